// SPDX-License-Identifier: Apache-2.0
#include "lockstep/launch/node_link.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstdio>
#include <map>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/version.h"
#include "lockstep/launch/rendezvous/network_interface.h"
#include "lockstep/launch/rendezvous/socket.h"

namespace lockstep::launch {
namespace {

constexpr milliseconds kProgressEvery{5'000};
constexpr milliseconds kPoll{50};
constexpr milliseconds kLeaveTime{3'000};
// So that nodes that join too late, after the start has failed, can still be told why.
constexpr milliseconds kLateComers{1'000};

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

Outcome lost_outcome(const std::string& text) { return {Outcome::Kind::failed, 1, false, text}; }

// For what must not fail the job by itself: where the rendezvous is gone, the listener sees it too
// and says so.
template <class Call>
void try_telling(Call call) {
  try {
    call();
  } catch (const Error&) {
  } catch (const Interrupted&) {
  }
}

}  // namespace

NodeLink::NodeLink(LaunchOptions& options, const std::string& token, Console& console,
                   Signals& signals)
    : console_(console),
      signals_(signals),
      nodes_(options.nodes),
      node_rank_(options.node_rank),
      meet_time_(options.meet_time),
      news_fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!news_fd_.valid()) throw SystemError("eventfd", errno);
  const Deadline deadline(meet_time_);
  address_ = options.rendezvous.empty() ? "127.0.0.1:0" : options.rendezvous;
  master_addr_ = parse_host_port(address_, "--rendezvous").host;
  if (node_rank_ == 0) {
    if (!alone() && options.interface.empty()) wait_for_own_name(deadline);
    const HostPort here =
        listening_address(parse_host_port(address_, "--rendezvous"), options.interface);
    server_ = std::make_unique<RendezvousServer>(
        token, here.text(),
        RendezvousServer::Expected{.ranks = options.world_size(), .nodes = nodes_});
    address_ = server_->address();
    run_id_ = "lockstep-" + make_token().substr(0, 12);
    // Bound, never listening: Linux lets a rank's socket with SO_REUSEADDR listen on the port
    // meanwhile, and gives it to no process that asks for any port.
    master_port_holder_ = bind_socket({here.host, 0});
    master_port_ = port_of(master_port_holder_);
    warn_of_address();
  }
  if (!alone()) {
    meet(options, token, deadline);
    try {
      exchange_facts(options);
    } catch (const Error&) {
      leave();  // the others shall see the reason, not a rendezvous that is gone
      throw;
    }
  }
}

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
  Deadline progress(kProgressEvery);
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
      progress = Deadline(kProgressEvery);
    }
    signals_.pause(milliseconds{0});
  }
  client_->set(format("attempt/{}", node_rank_), std::to_string(options.first_attempt));
  client_->set(format("node/{}", node_rank_),
               format("{}{}{}", options.ranks, kOfVersion, LOCKSTEP_VERSION));
}

void NodeLink::exchange_facts(LaunchOptions& options) {
  if (node_rank_ == 0) {
    const std::string verdict = judge(options);
    if (!client_->find(kJoinedKey)) client_->set(kJoinedKey, verdict);
  }
  std::optional<std::string> verdict;
  // Longer than node 0 waits: it can say who is missing.
  wait_until([&] { return (verdict = client_->find(kJoinedKey)).has_value(); },
             meet_time_ + kLeaveTime, [] { return std::string("the other nodes"); });
  const std::string facts = join_result(*verdict);
  char run_id[64] = "";
  if (std::sscanf(facts.c_str(), "%d %d %hu %63s", &options.max_restarts, &options.first_attempt,
                  &master_port_, run_id) != 4) {
    throw CommError(format("rendezvous {}: the job's facts are malformed", address_));
  }
  run_id_ = run_id;
}

// Waits for all nodes and compares what they start. Returns the result for all of them.
std::string NodeLink::judge(const LaunchOptions& options) {
  std::vector<std::string> starts;
  const auto find_node = [&](int node) { return client_->find(format("node/{}", node)); };
  const auto missing = [&] {
    std::vector<int> nodes;
    for (int node = 0; node < nodes_; ++node) {
      if (!find_node(node)) nodes.push_back(node);
    }
    return format("node{} {}", nodes.size() > 1 ? "s" : "", join(nodes));
  };
  const auto all_came = [&] {
    while (static_cast<int>(starts.size()) < nodes_) {
      const auto found = find_node(static_cast<int>(starts.size()));
      if (!found) return client_->find(kJoinedKey).has_value();
      starts.push_back(*found);
    }
    return true;
  };
  try {
    wait_until(all_came, meet_time_, missing);
  } catch (const TimeoutError& late) {
    return format("late {}", late.what());
  }
  const auto differs = [&](const std::string& start) { return start != starts.front(); };
  if (std::none_of(starts.begin(), starts.end(), differs)) {
    int attempt = 0;  // free in the log folders of all nodes
    for (int node = 0; node < nodes_; ++node) {
      const auto free = client_->find(format("attempt/{}", node));
      attempt = std::max(attempt, std::stoi(free.value_or("0")));
    }
    return format("met {} {} {} {}", options.max_restarts, attempt, master_port_, run_id_);
  }
  std::vector<std::string> parts;
  std::map<std::string, std::vector<size_t>> holders;
  for (size_t node = 0; node < starts.size(); ++node) holders[starts[node]].push_back(node);
  for (const auto& [start, nodes] : holders) {
    parts.push_back(format("node{} {} {} {}", nodes.size() > 1 ? "s" : "", join(nodes),
                           nodes.size() > 1 ? "start" : "starts", start));
  }
  return format("refused {}: {}; it must be the same on every node", what_differs(starts),
                join(parts, "; "));
}

void NodeLink::wait_until(const std::function<bool()>& done, milliseconds patience,
                          const std::function<std::string()>& what) {
  const Deadline deadline(patience);
  Deadline progress(kProgressEvery);
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
      progress = Deadline(kProgressEvery);
    }
    signals_.pause(kPoll);
  }
}

void NodeLink::wait_for(const std::string& key) {
  wait_until([&] { return client_->find(key).has_value(); }, meet_time_,
             [] { return std::string("the other nodes"); });
}

void NodeLink::begin(int generation) {
  if (alone()) return server_->begin_generation(generation);
  listener_ = {};  // of the generation before
  generation_ = generation;
  take_news();
  const std::string full = format("full/{}", generation), go = format("go/{}", generation);
  if (client_->add(format("ready/{}", generation), 1) == nodes_) client_->set(full, "yes");
  if (node_rank_ == 0) {
    wait_for(full);
    server_->begin_generation(generation);
    client_->set(go, "yes");
  }
  wait_for(go);
  listener_ = std::jthread([this](const std::stop_token& stop) { listen(stop); });
}

// Polls, so that one thread watches several keys and no wait outlives the job.
void NodeLink::listen(const std::stop_token& stop) {
  std::mutex mutex;
  std::condition_variable_any tick;
  bool stop_told = false;
  const std::string end_key = format("end/{}", generation_);
  while (!stop.stop_requested()) {
    try {
      if (const auto number = client_->find("stop"); number && !std::exchange(stop_told, true)) {
        post({std::stoi(*number), std::nullopt});
      }
      if (const auto text = client_->find(end_key)) {
        return post({std::nullopt, unpack_outcome(*text).value_or(
                                       lost_outcome("a node sent a malformed outcome"))});
      }
      for (int node = 1; server_ && node < nodes_; ++node) {
        const auto how = client_->find(lost_key(node));
        if (how) tell_end(lost_outcome(format("node {} was lost: {}", node, *how)));
      }
    } catch (const std::exception& failure) {
      return post({std::nullopt, lost_outcome(format("node 0 was lost: {}", failure.what()))});
    }
    std::unique_lock lock(mutex);
    tick.wait_for(lock, stop, kPoll, [] { return false; });
  }
}

void NodeLink::post(const News& news) {
  {
    const std::lock_guard lock(news_mutex_);
    if (news.stop) news_.stop = news.stop;
    if (news.end) news_.end = news.end;
  }
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(news_fd_.get(), &one, sizeof one);
}

NodeLink::News NodeLink::take_news() {
  uint64_t count = 0;
  [[maybe_unused]] const ssize_t got = ::read(news_fd_.get(), &count, sizeof count);
  const std::lock_guard lock(news_mutex_);
  return std::exchange(news_, {});
}

void NodeLink::tell_stop(int signal) {
  if (alone()) return;
  try_telling([&] { client_->set("stop", std::to_string(signal)); });
}

void NodeLink::tell_end(const Outcome& outcome) {
  if (alone()) return;
  try_telling([&] {
    if (client_->add(format("claim/{}", generation_), 1) == 1) {
      client_->set(format("end/{}", generation_), pack(outcome));
    }
  });
}

void NodeLink::tell_done() {
  if (alone()) return;
  try_telling([&] {
    if (client_->add(format("done/{}", generation_), 1) == nodes_) tell_end(Outcome{});
  });
}

void NodeLink::mark_lost(int rank, const std::string& how) {
  if (server_) server_->mark_lost(rank, how);
}

void NodeLink::leave() {
  listener_ = {};
  if (alone()) return;
  try_telling([&] {
    client_->set(format("left/{}", node_rank_), "yes");
    const Deadline deadline(kLeaveTime), late(kLateComers);
    for (int node = 1; server_ && node < nodes_ && !deadline.passed();) {
      const bool came = client_->find(format("node/{}", node)).has_value();
      if ((!came && late.passed()) || client_->find(format("left/{}", node)) ||
          client_->find(lost_key(node))) {
        ++node;
      } else {
        signals_.pause(kPoll);
      }
    }
  });
}

}  // namespace lockstep::launch
