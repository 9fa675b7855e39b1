// SPDX-License-Identifier: Apache-2.0
// Gloo takes whatever connects to its ports first for the peer that it waits for, and cannot be
// told that this was a stranger, such as a port scan. So an attempt to connect a group is made on a
// thread that can be given up, every pair of ranks exchanges a word that only they know, and all
// ranks vote. Unless all agree, they try again with new ports and new keys.
#include "lockstep/comm/backends/gloo/connect.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros_like.h>

#include <future>
#include <set>
#include <thread>

#include "lockstep/comm/backends/gloo/no_sigpipe.h"
#include "lockstep/comm/backends/gloo/store_adapter.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/log.h"
#include "lockstep/launch/rendezvous/network_interface.h"

namespace lockstep::comm::gloo {
namespace {

constexpr milliseconds kLook{20}, kWait{200};
constexpr milliseconds kLongestPause{100};
constexpr int kWarnAfter = 3;

using GlooEngine = c10::intrusive_ptr<TaggedGloo>;

std::string first_line(const std::exception& error) {
  const std::string words = error.what();
  return words.substr(0, words.find('\n'));
}

auto make_device(const detail::Membership& membership) {
  const detail::World& world = *membership.world;
  std::set<int> hosts;
  for (const int member : membership.members)
    hosts.insert(world.hosts[static_cast<size_t>(member)]);
  // torch's own variable; LOCKSTEP_INTERFACE is in the address already.
  const char* interface = std::getenv("GLOO_SOCKET_IFNAME");
  if (!launch::interface_from_environment().empty()) interface = nullptr;
  return interface != nullptr ? c10d::ProcessGroupGloo::createDeviceForInterface(interface)
                              : c10d::ProcessGroupGloo::createDeviceForHostname(
                                    hosts.size() == 1 ? std::string("127.0.0.1") : world.address);
}

// What one rank says to another.
int64_t word(uint64_t secret, int from, int to) {
  return static_cast<int64_t>(secret + (static_cast<uint64_t>(from) << 32) +
                              static_cast<uint64_t>(to));
}

void prove(c10d::ProcessGroupGloo& engine, uint64_t secret, milliseconds timeout) {
  at::Tensor sent = at::empty({engine.getSize()}, at::kLong), received = at::zeros_like(sent);
  for (int to = 0; to < engine.getSize(); ++to) sent[to] = word(secret, engine.getRank(), to);
  std::vector<int64_t> even;
  engine.alltoall_base(received, sent, even, even)->wait(timeout);
  for (int from = 0; from < engine.getSize(); ++from) {
    if (received[from].item<int64_t>() != word(secret, from, engine.getRank()))
      throw CommError(format("the peer that connected for rank {} is not that rank", from));
  }
}

// One attempt, as this rank sees it.
class Attempt {
 public:
  Attempt(const detail::Membership& membership, int number)
      : membership_(membership),
        store_(*membership.world->store),
        prefix_(format("gloo/{}/{}/", membership.name, number)) {
    auto options = c10d::ProcessGroupGloo::Options::create(membership.world->timeout);
    options->devices.push_back(make_device(membership));
    std::promise<GlooEngine> promise;
    connecting_ = promise.get_future();
    // It may wait in Gloo long after this rank has given the attempt up, so it shares nothing.
    std::thread([promise = std::move(promise), options = std::move(options), prefix = prefix_,
                 store = std::weak_ptr(membership.world->store), rank = membership.rank,
                 size = membership.size(), timeout = membership.world->timeout,
                 secret = membership.world->incarnation]() mutable {
      const NoSigpipe no_signal;  // for the threads that Gloo starts now
      try {
        auto engine = c10::make_intrusive<TaggedGloo>(
            c10::make_intrusive<StoreAdapter>(store, prefix, timeout), rank, size, options);
        prove(*engine, secret, timeout);
        promise.set_value(std::move(engine));
      } catch (...) {
        promise.set_exception(std::current_exception());
      }
    }).detach();
  }

  // The engine if all ranks are connected, else null and `reason` filled in.
  GlooEngine result(const Deadline& deadline, std::string& reason) {
    const std::string key = prefix_ + "verdict";
    std::optional<std::string> verdict;
    while (!verdict) {
      if (connecting_.valid() && connecting_.wait_for(kLook) == std::future_status::ready) vote();
      verdict = connecting_.valid() ? store_.find(key) : wait_for(key);
      if (verdict) break;
      throw_if_lost();
      if (deadline.passed()) {
        throw TimeoutError(format(
            "[init] gloo could not connect the {} ranks of group '{}' within {} ms: {}",
            membership_.size(), membership_.name, membership_.world->timeout.count(),
            reason.empty() ? "some ranks did not come" : "the last attempt failed: " + reason));
      }
    }
    if (*verdict == "connected") return engine_;
    reason = *verdict;
    return {};
  }

 private:
  void vote() {
    std::string failure;
    try {
      engine_ = connecting_.get();
      if (store_.add(prefix_ + "connected", 1) == membership_.size())
        store_.set(prefix_ + "verdict", "connected");
      return;
    } catch (const c10::Error& error) {
      failure = error.what_without_backtrace();
    } catch (const std::exception& error) {
      failure = first_line(error);
    }
    if (store_.add(prefix_ + "failed", 1) == 1)
      store_.set(prefix_ + "verdict", format("rank {}: {}", membership_.rank, failure));
  }

  std::optional<std::string> wait_for(const std::string& key) {
    try {
      return store_.get(key, Deadline(kWait));
    } catch (const TimeoutError&) {
      return std::nullopt;
    }
  }

  void throw_if_lost() {
    for (int peer = 0; peer < membership_.size(); ++peer) {
      const int member = membership_.members[static_cast<size_t>(peer)];
      if (const auto how = store_.find(launch::lost_key(member)))
        throw PeerLost(peer, format("[init] gloo: rank {} was lost before group '{}' was "
                                    "connected: {}",
                                    peer, membership_.name, *how));
    }
  }

  const detail::Membership& membership_;
  launch::Store& store_;
  const std::string prefix_;
  std::future<GlooEngine> connecting_;  // until this rank has voted
  GlooEngine engine_;
};

}  // namespace

c10::intrusive_ptr<TaggedGloo> connect(const detail::Membership& membership) {
  const Deadline deadline(membership.world->timeout);
  std::string reason;
  for (int number = 1;; ++number) {
    if (auto engine = Attempt(membership, number).result(deadline, reason)) return engine;
    if (number == kWarnAfter)
      log::warn(format(
          "[init] gloo: {} attempts to connect group '{}' have failed, the last because of {}; the "
          "ranks try again until {} ms have passed. Does something else connect to their ports?",
          number, membership.name, reason, membership.world->timeout.count()));
    std::this_thread::sleep_for(std::min(milliseconds{5 * number}, kLongestPause));
  }
}

}  // namespace lockstep::comm::gloo
