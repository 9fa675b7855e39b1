#include "lockstep/comm/watch.h"

#include <algorithm>
#include <cstring>
#include <sstream>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/log.h"
#include "lockstep/fabric/agreement.h"

namespace lockstep::comm::detail {
namespace {

using fabric::Operation;
using fabric::OpKind;

constexpr milliseconds kFirstLook{100};  // operations that end sooner cost no look at the store
constexpr milliseconds kLookInterval{200};
constexpr milliseconds kWarnAfter{2000};

using fabric::is_message;

std::string describe_activity(const fabric::Activity& activity) {
  if (activity.sequence == 0) return "has not reported any operation yet";
  return format("reported last that it {} {} #{}", activity.running ? "is in" : "has finished",
                fabric::name_of(activity.kind), activity.sequence);
}

}  // namespace

Watch::Watch(const Membership& membership)
    : name_(membership.name),
      rank_(membership.rank),
      members_(membership.members),
      store_(membership.world->store) {
  World& world = *membership.world;
  if (!world.reporter) world.reporter = std::make_shared<ActivityReporter>(world.store);
  reporter_ = world.reporter;
  activity_ = reporter_->watch(key(rank_));
}

std::string Watch::key(int rank) const { return format("activity/{}/{}", name_, rank); }

uint64_t Watch::begin(const Operation& operation) {
  {
    const std::lock_guard lock(mutex_);
    if (failure_) std::rethrow_exception(failure_);
  }
  const uint64_t sequence = is_message(operation.kind) ? ++messages_ : ++sequence_;
  activity_->store(fabric::Activity{operation.kind, true, sequence}.pack(),
                   std::memory_order_relaxed);
  return sequence;
}

void Watch::end(const Operation& operation, uint64_t sequence) {
  activity_->store(fabric::Activity{operation.kind, false, sequence}.pack(),
                   std::memory_order_relaxed);
}

std::optional<std::string> Watch::look_up(const std::string& key) const {
  try {
    return store_->find(key);
  } catch (const std::exception& error) {
    throw CommError(format("rank {} of group '{}': the job's meeting point is gone: {}", rank_,
                           name_, error.what()));
  }
}

// Members that have not reached this operation, as far as they have reported.
std::vector<Watch::Peer> Watch::behind(const Operation& operation, uint64_t sequence) const {
  std::vector<Peer> peers;
  for (int peer = 0; peer < static_cast<int>(members_.size()); ++peer) {
    if (peer == rank_ || (is_message(operation.kind) && peer != operation.root)) continue;
    const auto word = look_up(key(peer));
    const auto activity = fabric::Activity::unpack(word ? std::stoull(*word) : 0);
    if (is_message(operation.kind) || is_message(activity.kind) || activity.sequence < sequence)
      peers.push_back({peer, activity});
  }
  return peers;
}

void Watch::fail(std::exception_ptr error) {
  {
    const std::lock_guard lock(mutex_);
    if (!failure_) failure_ = error;
  }
  // "kind rank message", so that others throw the same type. The first one to fail is heard.
  const std::string failure_key = format("failure/{}", name_);
  const auto tell = [&](char kind, int rank, const char* message) {
    try {
      if (!store_->find(failure_key))
        store_->set(failure_key, format("{} {} {}", kind, rank, message));
    } catch (const std::exception&) {  // the meeting point is gone: they find out by themselves
    }
  };
  try {
    std::rethrow_exception(error);
  } catch (const PeerLost& lost) {
    tell('L', lost.rank(), lost.what());
    throw;
  } catch (const TimeoutError& timeout) {
    tell('T', rank_, timeout.what());
    throw;
  } catch (const MismatchError& mismatch) {
    tell('M', rank_, mismatch.what());
    throw;
  } catch (const std::exception& other) {
    tell('E', rank_, other.what());
    throw;
  }
}

void Watch::check_agreement(
    const Operation& operation, uint64_t sequence,
    const std::function<void(std::span<const std::byte>, std::span<std::byte>)>& exchange) const {
  const auto size = members_.size();
  const size_t counts_at = sizeof(fabric::Signature),
               record_size = counts_at + 2 * size * sizeof(int64_t);
  std::vector<std::byte> mine(record_size), all(size * record_size);
  const fabric::Signature signature = fabric::signature_of(operation);
  std::memcpy(mine.data(), &signature, sizeof signature);
  const auto put = [&](const std::vector<int64_t>& counts, size_t at) {
    if (!counts.empty())
      std::memcpy(mine.data() + counts_at + at * sizeof(int64_t), counts.data(),
                  counts.size() * sizeof(int64_t));
  };
  put(operation.send_counts, 0);
  put(operation.recv_counts, size);
  exchange(mine, all);
  const auto record = [&](int rank) {
    return all.data() + static_cast<size_t>(rank) * record_size;
  };
  fabric::check_agreement(
      {name_, sequence, static_cast<int>(size),
       [&](int rank) -> const fabric::Signature& {
         return *reinterpret_cast<const fabric::Signature*>(record(rank));
       },
       [&](int rank) { return reinterpret_cast<const int64_t*>(record(rank) + counts_at); }});
}

void Watch::throw_if_lost(const Operation& operation, uint64_t sequence) const {
  if (const auto failure = look_up(format("failure/{}", name_))) {
    std::istringstream words(*failure);
    char kind = 'E';
    int rank = -1;
    std::string message;
    words >> kind >> rank;
    std::getline(words.ignore(), message);
    if (kind == 'L') throw PeerLost(rank, message);
    if (kind == 'T') throw TimeoutError(message);
    if (kind == 'M') throw MismatchError(message);
    throw CommError(message);
  }
  for (int peer = 0; peer < static_cast<int>(members_.size()); ++peer) {
    if (peer == rank_) continue;
    const auto how = look_up(launch::lost_key(members_[static_cast<size_t>(peer)]));
    if (!how) continue;
    const auto word = look_up(key(peer));
    throw PeerLost(
        peer, format("[{}] rank {} of group '{}': rank {} is lost ({}), while operation #{} {} was "
                     "running; rank {} {}",
                     fabric::name_of(operation.kind), rank_, name_, peer, *how, sequence,
                     fabric::describe(operation), peer,
                     describe_activity(fabric::Activity::unpack(word ? std::stoull(*word) : 0))));
  }
}

std::string Watch::describe_wait(const Operation& operation, uint64_t sequence,
                                 double seconds) const {
  std::string text = format("[{}] rank {} of group '{}': operation #{} {} has waited {:.1f} s",
                            fabric::name_of(operation.kind), rank_, name_, sequence,
                            fabric::describe(operation), seconds);
  const auto late = behind(operation, sequence);
  std::vector<int> ranks;
  for (const Peer& peer : late) ranks.push_back(peer.rank);
  if (!ranks.empty()) text += format(" for rank{} {}", ranks.size() > 1 ? "s" : "", join(ranks));
  for (const Peer& peer : late)
    text += format("; rank {} {}", peer.rank, describe_activity(peer.activity));
  return text;
}

void Watch::wait(const Operation& operation, uint64_t sequence, Clock::time_point started,
                 const std::function<bool(milliseconds)>& poll) const {
  bool warned = false;
  milliseconds slice = kFirstLook;
  const auto left = [&] {
    return std::chrono::ceil<milliseconds>(started + operation.timeout - Clock::now());
  };
  while (!poll(std::max(milliseconds{1}, std::min(slice, left())))) {
    slice = kLookInterval;
    throw_if_lost(operation, sequence);
    if (left() <= milliseconds{0}) {
      throw TimeoutError(describe_wait(operation, sequence, seconds_since(started)) +
                         "; that is the deadline");
    }
    if (!warned && Clock::now() - started >= std::max(kWarnAfter, operation.timeout / 15)) {
      warned = true;
      log::warn(describe_wait(operation, sequence, seconds_since(started)));
    }
  }
}

void Watch::explain(const Operation& operation, uint64_t sequence, const std::string& words) const {
  // The engine may notice a death before the meeting point does: give that, and the others'
  // reports, a moment.
  const Deadline moment(2 * ActivityReporter::kInterval);
  std::condition_variable never;
  std::mutex mutex;
  std::unique_lock lock(mutex);
  while (!moment.passed()) {
    throw_if_lost(operation, sequence);
    never.wait_for(lock, milliseconds{20});
  }
  const auto late = behind(operation, sequence);
  const std::string text = format("[{}] rank {} of group '{}': operation #{} {} failed: {}",
                                  fabric::name_of(operation.kind), rank_, name_, sequence,
                                  fabric::describe(operation), words);
  if (late.empty()) throw CommError(text);
  throw PeerLost(late[0].rank,
                 format("{}; rank {} {}", text, late[0].rank, describe_activity(late[0].activity)));
}

}  // namespace lockstep::comm::detail
