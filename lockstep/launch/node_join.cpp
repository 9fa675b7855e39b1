// SPDX-License-Identifier: Apache-2.0
// How the launchers of a job's nodes find each other, and compare what they start.
#include <algorithm>
#include <cstdio>
#include <map>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/version.h"
#include "lockstep/launch/node_link.h"
#include "lockstep/launch/rendezvous/network_interface.h"
#include "lockstep/launch/rendezvous/socket.h"

namespace lockstep::launch {
namespace {

constexpr milliseconds kJoinPoll{50};
constexpr milliseconds kSayEvery{5'000};
constexpr milliseconds kVerdictTime{3'000};  // that node 0 has to say who is missing

// Between the number of ranks that a node starts and their version.
constexpr std::string_view kOfVersion = " ranks of Lockstep ";

// Which of the two, where nodes start different ones.
std::string_view what_differs(const std::vector<std::string>& starts) {
  const auto ranks_of = [](const std::string& start) {
    return start.substr(0, start.find(kOfVersion));
  };
  const auto version_of = [&](const std::string& start) {
    return start.substr(ranks_of(start).size());
  };
  bool ranks = false, version = false;
  for (const std::string& start : starts) {
    ranks |= ranks_of(start) != ranks_of(starts.front());
    version |= version_of(start) != version_of(starts.front());
  }
  return !version ? "-n differs" : ranks ? "-n and the version differ" : "the version differs";
}

}  // namespace

// As the other nodes do; without it there is nothing to listen on.
void NodeLink::wait_for_own_name(const Deadline& deadline) {
  if (wait_for_name(master_addr_, Deadline(milliseconds{0}))) return;
  console_.message(format("node 0 waits until this host can resolve the name '{}'", master_addr_));
  while (!wait_for_name(master_addr_, Deadline(milliseconds{500})) && !deadline.passed())
    signals_.pause(milliseconds{0});
}

void NodeLink::warn_of_address() {
  const std::string bound = host_of(master_port_holder_);
  if (bound == "0.0.0.0" || bound == "::") {
    console_.message(format("--rendezvous {}: listens on every address of this machine", address_));
  }
  // Debian's /etc/hosts gives a machine's own name such an address.
  const bool meant = is_loopback(master_addr_) || master_addr_ == "localhost";
  if (!alone() && is_loopback(bound) && !meant) {
    console_.message(
        format("--rendezvous {}: on this host the name resolves to {}, which other nodes cannot "
               "reach; give an address, or --interface",
               address_, bound));
  }
}

void NodeLink::meet(const LaunchOptions& options, const std::string& token,
                    const Deadline& deadline) {
  Deadline progress(kSayEvery);
  const auto start = Clock::now();
  while (!client_) {
    try {
      client_ = std::make_unique<RendezvousClient>(address_, token,
                                                   Identity{node_rank_, nodes_, kControlGeneration},
                                                   Deadline(milliseconds{500}), start);
    } catch (const TimeoutError& failure) {
      if (deadline.passed()) {
        throw TimeoutError(format("node {}: {}, or wait longer with --rendezvous-timeout",
                                  node_rank_, failure.what()));
      }
    } catch (const CommError& failure) {
      throw CommError(format("node {}: {}", node_rank_, failure.what()));
    }
    if (!client_ && progress.passed()) {
      console_.message(format("node {} waits for node 0 at {}", node_rank_, address_));
      progress = Deadline(kSayEvery);
    }
    signals_.pause(milliseconds{0});
  }
  client_->remove(format("left/{}", node_rank_));
  client_->set(format("attempt/{}", node_rank_), std::to_string(options.first_attempt));
  starts_ = format("{}{}{}", options.ranks, kOfVersion, LOCKSTEP_VERSION);
  client_->set(format("node/{}", node_rank_), format("{} {}", life_, starts_));
}

void NodeLink::exchange_facts(LaunchOptions& options) {
  if (node_rank_ == 0) {
    const std::string verdict = judge(options);
    if (!client_->find(kJoinedKey)) client_->set(kJoinedKey, verdict);
  }
  std::optional<std::string> verdict;
  // Longer than node 0 waits: it can say who is missing.
  wait_until([&] { return (verdict = client_->find(kJoinedKey)).has_value(); },
             meet_time_ + kVerdictTime, [] { return std::string("the other nodes"); });
  const std::string facts = join_result(*verdict);
  const int own_attempt = options.first_attempt;
  char run_id[64] = "";
  if (std::sscanf(facts.c_str(), "%d %d %d %hu %63s", &options.max_restarts, &options.min_nodes,
                  &options.first_attempt, &master_port_, run_id) != 5) {
    throw CommError(format("rendezvous {}: the job's facts are malformed", address_));
  }
  run_id_ = run_id;
  free_attempt_ = own_attempt - options.first_attempt;
  restarts_ = options.max_restarts > 0;
  elastic_ = options.node_bounds().is_elastic();
}

// What a node starts, and which of its launchers does: "LIFE RANKS ranks of Lockstep VERSION".
std::optional<NodeLink::Node> NodeLink::find_node(int node) {
  const auto text = client_->find(format("node/{}", node));
  if (!text) return std::nullopt;
  const size_t space = text->find(' ');
  return Node{text->substr(0, space), space == std::string::npos ? "" : text->substr(space + 1)};
}

// Waits for all nodes and compares what they start. Returns the result for all of them.
std::string NodeLink::judge(const LaunchOptions& options) {
  std::map<int, std::string> starts;  // by node
  const auto missing = [&] {
    std::vector<int> nodes;
    for (int node = 0; node < nodes_; ++node) {
      if (!starts.contains(node)) nodes.push_back(node);
    }
    return format("node{} {}", nodes.size() > 1 ? "s" : "", join(nodes));
  };
  const auto all_came = [&] {
    for (int node = 0; node < nodes_; ++node) {
      if (starts.contains(node)) continue;
      if (const auto found = find_node(node)) starts[node] = found->starts;
    }
    return static_cast<int>(starts.size()) == nodes_ || client_->find(kJoinedKey).has_value();
  };
  try {
    wait_until(all_came, meet_time_, missing);
  } catch (const TimeoutError& late) {
    if (static_cast<int>(starts.size()) < options.node_bounds().min)
      return format("late {}", late.what());
  }
  const auto differs = [&](const auto& start) { return start.second != starts_; };
  if (std::none_of(starts.begin(), starts.end(), differs)) {
    int attempt = 0;  // free in the log folders of all nodes
    for (const auto& [node, start] : starts) {
      const auto free = client_->find(format("attempt/{}", node));
      attempt = std::max(attempt, std::stoi(free.value_or("0")));
    }
    return format("met {} {} {} {} {}", options.max_restarts, options.min_nodes, attempt,
                  master_port_, run_id_);
  }
  std::vector<std::string> parts, each;
  std::map<std::string, std::vector<int>> holders;
  for (const auto& [node, start] : starts) {
    each.push_back(start);
    holders[start].push_back(node);
  }
  for (const auto& [start, nodes] : holders) {
    parts.push_back(format("node{} {} {} {}", nodes.size() > 1 ? "s" : "", join(nodes),
                           nodes.size() > 1 ? "start" : "starts", start));
  }
  return format("refused {}: {}; it must be the same on every node", what_differs(each),
                join(parts, "; "));
}

void NodeLink::wait_until(const std::function<bool()>& done, milliseconds patience,
                          const std::function<std::string()>& what) {
  const Deadline deadline(patience);
  Deadline progress(kSayEvery);
  while (!done()) {
    if (const auto stop = client_->find("stop")) throw Interrupted{std::stoi(*stop)};
    for (int node = 0; node < nodes_; ++node) {
      const auto how = client_->find(lost_key(node));
      if (how) throw CommError(format("node {} was lost: {}", node, *how));
    }
    if (deadline.passed()) {
      throw TimeoutError(
          format("node {} has waited {} s for {}", node_rank_, patience.count() / 1000, what()));
    }
    if (progress.passed()) {
      console_.message(format("node {} waits for {}", node_rank_, what()));
      progress = Deadline(kSayEvery);
    }
    signals_.pause(kJoinPoll);
  }
}

}  // namespace lockstep::launch
