// SPDX-License-Identifier: Apache-2.0
// What the launchers of a job's nodes tell each other: that they are there, when to begin, who
// failed, when to stop.
//
// Node 0 hosts the rendezvous; launchers meet there in a space of their own (kControlGeneration),
// with these keys:
//   node/R     which life of node R is there (its launcher draws it), and what it starts: ranks per
//              node, and of which version
//   attempt/R  the first attempt whose log folders are free on node R
//   joined     (kJoinedKey) node 0's facts once all are there: restarts, fewest nodes, first
//              attempt, master port, run id
//   refused/L  why the node of this life cannot join a job that runs
//   ready/G/R  the life of node R that has nothing running and waits for generation G
//   go/G       the nodes that run generation G; generation: the latest G
//   claim/G    who adds first may set end/G, how generation G ended; next/G: what node 0 decides
//   resize/G   the ranks of G shall stop, because more nodes are ready
//   done/G     how many nodes have seen all their ranks end well
//   stop       the signal that asked one of them to stop
//   left/R     node R needs the rendezvous no more; over: how the job ended
// What a node that was lost has set counts no more: it comes back with another life.
// On one node there is no other launcher to tell, and only the rendezvous for the ranks remains.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "lockstep/core/fd.h"
#include "lockstep/launch/launcher.h"
#include "lockstep/launch/outcome.h"
#include "lockstep/launch/processes/console.h"
#include "lockstep/launch/processes/signals.h"
#include "lockstep/launch/rendezvous/rendezvous.h"
#include "lockstep/launch/restart_policy.h"
#include "lockstep/launch/world.h"

namespace lockstep::launch {

// Thrown where this node waits to join a start, and the job has ended instead.
struct JobOver {
  Outcome outcome;
};

// All calls come from the launcher's one thread; a helper thread only listens.
class NodeLink {
 public:
  // Meets the other nodes and takes over into `options` what node 0 decides. Throws ConfigError
  // where they disagree, TimeoutError after options.meet_time, Interrupted.
  NodeLink(LaunchOptions& options, const std::string& token, Console& console, Signals& signals);

  bool alone() const { return nodes_ == 1; }
  const std::string& rendezvous() const { return address_; }
  // Where a program may open its own rendezvous: no other process is given this port during the
  // job.
  const std::string& master_addr() const { return master_addr_; }
  uint16_t master_port() const { return master_port_; }
  const std::string& run_id() const { return run_id_; }

  // Returns when nothing of an earlier generation runs on any node that takes part: what is
  // started, of which `here` on this node. A node that comes late waits until the job needs it, and
  // learns the number of its generation here. Throws as the constructor does, and JobOver.
  World begin(int generation, const Places::Start& here);

  struct News {
    std::optional<int> stop = std::nullopt;
    std::optional<Outcome> end = std::nullopt;
    bool resize = false;  // more nodes are ready
  };
  // Readable when there is news from the other nodes.
  int news_fd() const { return news_fd_.get(); }
  News take_news();

  void tell_stop(int signal);
  // The first of all nodes decides how this generation ended.
  void tell_end(const Outcome& outcome);
  void tell_done();
  // A rank of this node ended badly: its peers can learn how.
  void mark_lost(int rank, const std::string& how);

  // What follows the end of a generation: node 0 asks its policy.
  RestartPolicy::Decision agree(RestartPolicy& policy, const Outcome& outcome);

  // No more calls after this. Node 0 gives the others a moment to read how the job ended.
  void leave(const Outcome& outcome);
  // The same after a stop signal that came while no rank was running.
  void leave_stopped(const Outcome& outcome, int signal);

 private:
  void wait_for_own_name(const Deadline& deadline);
  void warn_of_address();
  void meet(const LaunchOptions& options, const std::string& token, const Deadline& deadline);
  void exchange_facts(LaunchOptions& options);
  std::string judge(const LaunchOptions& options);
  void wait_until(const std::function<bool()>& done, milliseconds patience,
                  const std::function<std::string()>& what);
  struct Node {
    std::string life, starts;
  };
  std::optional<Node> find_node(int node);
  struct Found {
    size_t here = 0;                   // nodes that are connected
    std::map<int, std::string> ready;  // with their lives
  };
  Found look_for(int generation);
  void set_ready(int generation);
  void choose_members(int generation, int ranks);
  void await_members();
  std::string lost_of(const std::vector<int>& before) const;
  void pause_between_looks();
  void look_after_members();
  void listen(const std::stop_token& stop);
  void post(const News& news);

  Console& console_;
  Signals& signals_;
  int nodes_ = 1, node_rank_ = 0, generation_ = 0;
  milliseconds meet_time_;
  const std::string life_;
  std::string starts_;
  Places places_;  // nodes; used on node 0
  bool elastic_ = false, restarts_ = false;
  // The first attempt whose log folders are free here, counted from the job's first; how many the
  // job left out here for it.
  int free_attempt_ = 0, attempts_skipped_ = 0;
  std::vector<int> members_;          // nodes that run this generation
  std::map<int, std::string> lives_;  // theirs
  bool must_start_ = false;           // what the ranks hold may be in memory only
  std::string address_, master_addr_, run_id_;
  uint16_t master_port_ = 0;
  Fd master_port_holder_, news_fd_;
  std::unique_ptr<RendezvousServer> server_;
  std::unique_ptr<RendezvousClient> client_;
  std::optional<int> stop_;  // that was told
  std::mutex news_mutex_;
  News news_;
  std::jthread listener_;
};

}  // namespace lockstep::launch
