// SPDX-License-Identifier: Apache-2.0
#include "lockstep/launch/node_link.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <set>
#include <sstream>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/launch/rendezvous/network_interface.h"
#include "lockstep/launch/rendezvous/socket.h"

namespace lockstep::launch {
namespace {

constexpr milliseconds kLeaveTime{3'000};
// So that nodes that join too late, after the start has failed, can still be told why.
constexpr milliseconds kLateComers{1'000};

constexpr milliseconds kProgressEvery{5'000};
constexpr milliseconds kPoll{50};

Outcome lost_outcome(const std::string& text, bool restartable = false) {
  return {Outcome::Kind::failed, 1, restartable, text};
}

// The nodes that have ranks, as go/G has them.
std::string pack_members(const std::vector<int>& members) { return join(members, " "); }

std::vector<int> unpack_members(const std::string& text) {
  std::istringstream words(text);
  std::vector<int> members;
  for (int node = 0; words >> node;) members.push_back(node);
  return members;
}

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
      life_(make_token().substr(0, 12)),
      places_(options.node_bounds(), options.grow_after, {}),
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
    } catch (const Error& failure) {
      leave(lost_outcome(
          failure.what()));  // the others shall see the reason, not a rendezvous that is gone
      throw;
    }
  }
}

World NodeLink::begin(int generation, const Places::Start& here) {
  World world{.generation = generation,
              .size = static_cast<int>(here.places.size()),
              .places = here.places,
              .grows_at = here.grows_at,
              .layout = here.layout};
  if (alone()) {
    server_->begin_generation(generation, world.size);
    if (stop_) post({.stop = stop_});  // so that the ranks hear of it once they can save
    return world;
  }
  listener_ = {};  // of the generation before
  take_news();
  const std::vector<int> before = members_;
  if (node_rank_ == 0) {
    choose_members(generation, world.size);
  } else {
    await_members();
  }
  const auto me = std::find(members_.begin(), members_.end(), node_rank_) - members_.begin();
  world.generation = generation_;
  world.first_rank = world.size * static_cast<int>(me);
  world.size *= static_cast<int>(members_.size());
  world.nodes = static_cast<int>(members_.size());
  world.node = static_cast<int>(me);
  world.lost = lost_of(before);
  if (before.empty()) attempts_skipped_ = std::max(0, free_attempt_ - generation_);
  world.attempts_skipped = attempts_skipped_;
  listener_ = std::jthread([this](const std::stop_token& stop) { listen(stop); });
  return world;
}

std::string NodeLink::lost_of(const std::vector<int>& before) const {
  std::vector<int> lost;
  std::set_difference(before.begin(), before.end(), members_.begin(), members_.end(),
                      std::back_inserter(lost));
  return lost.empty() ? "" : format("node{} {}", lost.size() > 1 ? "s" : "", join(lost));
}

// On node 0. A node that is lost is seen here too: it does not become ready.
void NodeLink::choose_members(int generation, int ranks) {
  const Deadline deadline(meet_time_);
  Deadline progress(kProgressEvery);
  std::set<int> failed;  // members of the generation before
  set_ready(generation);
  while (true) {
    const auto [here, ready] = look_for(generation);
    const bool settled = ready.size() == here || deadline.passed();
    for (int node = 0; node < nodes_; ++node) places_.set_present(node, ready.contains(node));
    for (const int node : members_) {
      const auto life = ready.find(node);
      const bool same = life != ready.end() && life->second == lives_[node];
      if (settled && !same && failed.insert(node).second) places_.fail({node}, Clock::now());
    }
    const std::vector<int> chosen = places_.next(Clock::now()).places;
    if (settled && !chosen.empty()) {
      members_ = chosen;
      lives_ = ready;
      break;
    }
    std::vector<int> missing;
    for (int node = 0; node < nodes_; ++node) {
      if (!ready.contains(node)) missing.push_back(node);
    }
    const std::string names = format("node{} {}", missing.size() > 1 ? "s" : "", join(missing));
    if (deadline.passed())
      throw TimeoutError(format("node 0 has waited {} s for {}", meet_time_.count() / 1000, names));
    if (progress.passed()) {
      console_.message(format("node 0 waits for {}", names));
      progress = Deadline(kProgressEvery);
    }
    pause_between_looks();
  }
  generation_ = generation;
  server_->begin_generation(generation, ranks * static_cast<int>(members_.size()));
  client_->set(format("go/{}", generation), pack_members(members_));
  client_->set("generation", std::to_string(generation));
}

// On the others. A node that is not among them waits for the next start.
void NodeLink::await_members() {
  const auto after_latest = [&] {
    const auto latest = client_->find("generation");
    return latest ? std::stoi(*latest) + 1 : 0;
  };
  int target = members_.empty() ? after_latest() : generation_ + 1;
  if (target > 0 && members_.empty())
    console_.message(format("node {} waits until the job continues with more nodes", node_rank_));
  set_ready(target);
  while (true) {
    if (const auto over = client_->find("over"))
      throw JobOver{
          unpack_outcome(*over).value_or(lost_outcome("node 0 sent a malformed outcome"))};
    if (const auto why = client_->find("refused/" + life_)) throw ConfigError(*why);
    if (const auto go = client_->find(format("go/{}", target))) {
      members_ = unpack_members(*go);
      generation_ = target;
      if (std::find(members_.begin(), members_.end(), node_rank_) != members_.end()) return;
      target = std::max(target + 1, after_latest());
      set_ready(target);
    }
    pause_between_looks();
  }
}

// A stop signal that comes here after ranks have stopped to be more must reach them: their state
// may be in memory only. Else the launcher ends, and says so as it leaves.
void NodeLink::pause_between_looks() {
  try {
    if (!stop_) {
      if (const auto stop = client_->find("stop")) throw Interrupted{std::stoi(*stop)};
    }
    signals_.pause(kPoll);
  } catch (const Interrupted& interrupted) {
    if (!must_start_) throw;
    tell_stop(interrupted.signal);
  }
}

void NodeLink::set_ready(int generation) {
  client_->set(format("ready/{}/{}", generation, node_rank_), life_);
}

// The nodes that are connected, and those of them that have nothing running and wait for it.
NodeLink::Found NodeLink::look_for(int generation) {
  Found found;
  for (int node = 0; node < nodes_; ++node) {
    const auto there = find_node(node);
    if (!there || client_->find(lost_key(node)) || client_->find(format("left/{}", node))) continue;
    if (there->starts != starts_) {
      client_->set("refused/" + there->life,
                   format("node {} starts {}, the job {}; it must be the same on every node", node,
                          there->starts, starts_));
      continue;
    }
    ++found.here;
    if (client_->find(format("ready/{}/{}", generation, node)) == there->life)
      found.ready[node] = there->life;
  }
  return found;
}

RestartPolicy::Decision NodeLink::agree(RestartPolicy& policy, const Outcome& outcome) {
  using Kind = Outcome::Kind;
  must_start_ = outcome.kind == Kind::resized;
  const bool ends = outcome.kind != Kind::resized &&
                    !(outcome.kind == Kind::failed && outcome.restartable && restarts_);
  if (alone() || node_rank_ == 0) {
    auto decision = policy.after(outcome);
    if (!alone() && !ends) client_->set(format("next/{}", generation_), pack(decision));
    return decision;
  }
  if (ends) return {};
  std::optional<std::string> next;
  while (!(next = client_->find(format("next/{}", generation_)))) {
    if (const auto over = client_->find("over"))
      throw JobOver{
          unpack_outcome(*over).value_or(lost_outcome("node 0 sent a malformed outcome"))};
    pause_between_looks();
  }
  const auto decision = unpack_decision(*next);
  if (!decision)
    throw CommError(format("rendezvous {}: node 0 sent a malformed decision", address_));
  return *decision;
}

// Polls, so that one thread watches several keys and no wait outlives the job.
void NodeLink::listen(const std::stop_token& stop) {
  std::mutex mutex;
  std::condition_variable_any tick;
  bool stop_told = false, resize_told = false;
  const std::string end_key = format("end/{}", generation_);
  const std::string resize_key = format("resize/{}", generation_);
  while (!stop.stop_requested()) {
    try {
      if (const auto number = client_->find("stop"); number && !std::exchange(stop_told, true)) {
        post({.stop = std::stoi(*number)});
      }
      if (const auto text = client_->find(end_key)) {
        // A resize that this generation ended with was written before its end.
        return post(
            {.end = unpack_outcome(*text).value_or(lost_outcome("a node sent a malformed outcome")),
             .resize = client_->find(resize_key).has_value()});
      }
      if (server_) look_after_members();
      if (!resize_told && client_->find(resize_key)) {
        resize_told = true;
        post({.resize = true});
      }
    } catch (const std::exception& failure) {
      return post({.end = lost_outcome(format("node 0 was lost: {}", failure.what()))});
    }
    std::unique_lock lock(mutex);
    tick.wait_for(lock, stop, kPoll, [] { return false; });
  }
}

// Node 0: whether one of those that run is lost, or more can run.
void NodeLink::look_after_members() {
  for (const int node : members_) {
    if (node == node_rank_) continue;
    const auto how = client_->find(lost_key(node));
    const auto there = find_node(node);
    if (!how && there && there->life == lives_[node]) continue;
    return tell_end(lost_outcome(
        format("node {} was lost: {}", node, how ? *how : "another launcher has taken its place"),
        restarts_));
  }
  if (!elastic_) return;
  const auto ready = look_for(generation_ + 1).ready;
  for (int node = 0; node < nodes_; ++node) {
    const bool runs = std::find(members_.begin(), members_.end(), node) != members_.end();
    places_.set_present(node, runs || ready.contains(node));
  }
  if (places_.next(Clock::now()).places.size() > members_.size())
    client_->set(format("resize/{}", generation_), "yes");
}

void NodeLink::post(const News& news) {
  {
    const std::lock_guard lock(news_mutex_);
    if (news.stop) news_.stop = news.stop;
    if (news.end) news_.end = news.end;
    news_.resize |= news.resize;
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
  stop_ = signal;
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
    if (client_->add(format("done/{}", generation_), 1) == static_cast<int>(members_.size()))
      tell_end(Outcome{});
  });
}

void NodeLink::mark_lost(int rank, const std::string& how) {
  if (server_) server_->mark_lost(rank, how);
}

// One that only waits to join a job that runs takes nothing with it.
void NodeLink::leave_stopped(const Outcome& outcome, int signal) {
  const bool takes_part = std::find(members_.begin(), members_.end(), node_rank_) != members_.end();
  try_telling([&] {
    if (!alone() && (takes_part || !client_->find("generation"))) tell_stop(signal);
  });
  leave(outcome);
}

void NodeLink::leave(const Outcome& outcome) {
  listener_ = {};
  if (alone()) return;
  try_telling([&] {
    if (server_) client_->set("over", pack(outcome));
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
