// SPDX-License-Identifier: Apache-2.0
#include "lockstep/comm/control/operation_watchdog.h"

#include <algorithm>
#include <cstring>
#include <typeinfo>

#include "lockstep/comm/control/job_roster.h"
#include "lockstep/comm/control/rank_error.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/log.h"
#include "lockstep/fabric/agreement.h"
#include "lockstep/flight/recorder.h"
#include "lockstep/io/crc32c.h"

namespace lockstep::comm::detail {
namespace {

using fabric::Operation;
using fabric::OpKind;

constexpr milliseconds kFirstLook{100};  // operations that end sooner cost no look at the store
constexpr milliseconds kLookInterval{200};
constexpr milliseconds kWarnAfter{2000};
constexpr milliseconds kAlone{1000};

// It is no longer known which rank is late or lost.
class RendezvousGone final : public CommError {
 public:
  using CommError::CommError;
};

using fabric::is_message;

std::string describe_activity(const fabric::Activity& activity) {
  if (activity.sequence == 0) return "has not reported any operation yet";
  return format("reported last that it {} {} #{}", activity.running ? "is in" : "has finished",
                fabric::name_of(activity.kind), activity.sequence);
}

std::string failure_key(const std::string& group) { return "failure/" + group; }

}  // namespace

void tell_failure(launch::Store& store, const std::string& group, int rank,
                  const std::exception_ptr& error) {
  RankError told = RankError::of(error, rank);
  if (!told.is_comm()) told.kind = RankError::Kind::comm;  // whatever it was, it broke the group
  told.message.resize(
      std::min(told.message.size(), told.message.find('\n')));  // a stack may follow
  try {
    if (!store.find(failure_key(group))) store.set(failure_key(group), told.to_text());
  } catch (const std::exception&) {  // the rendezvous is gone: they find out by themselves
  }
}

void throw_if_told(launch::Store& store, const std::string& group) {
  if (const auto failure = store.find(failure_key(group))) RankError::parse(*failure).raise();
}

OperationWatchdog::OperationWatchdog(const Membership& membership, std::string engine)
    : name_(membership.name),
      engine_(std::move(engine)),
      rank_(membership.rank),
      members_(membership.members),
      store_(membership.world->store),
      hosts_rendezvous_(membership.world->server != nullptr) {
  const auto host_of = [&](int member) {
    return membership.world->hosts[static_cast<size_t>(member)];
  };
  launcher_watches_ = flight::is_watched() && std::ranges::all_of(members_, [&](int member) {
                        return host_of(member) == host_of(members_.front());
                      });
  arrivals_ = std::make_shared<Arrivals>(
      membership, [failure = failure_, store = std::weak_ptr(store_), name = name_,
                   rank = rank_](const std::exception_ptr& error) {
        {
          const std::lock_guard lock(failure->mutex);
          if (!failure->error) failure->error = error;
        }
        if (const auto open = store.lock()) tell_failure(*open, name, rank, error);
      });
  reporter_ = reporter_of(*membership.world);
  activity_ = reporter_->watch(key(rank_));
}

std::string OperationWatchdog::key(int rank) const {
  return format("activity{}/{}/{}", engine_, name_, rank);
}

void OperationWatchdog::throw_if_failed() const {
  const std::lock_guard lock(failure_->mutex);
  if (failure_->error) std::rethrow_exception(failure_->error);
}

uint64_t OperationWatchdog::begin(const Operation& operation) {
  throw_if_failed();
  const uint64_t sequence = is_message(operation.kind) ? ++messages_ : ++sequence_;
  activity_->store(fabric::Activity{operation.kind, true, sequence}.pack(),
                   std::memory_order_relaxed);
  return sequence;
}

std::shared_ptr<Pending> OperationWatchdog::announce(const Operation& operation,
                                                     uint64_t sequence) {
  struct Announced final : Pending {
    Announced(OperationWatchdog& w, Operation o, uint64_t s)
        : watchdog(w), operation(std::move(o)), sequence(s) {}
    ~Announced() override { watchdog.end(operation, sequence); }
    void wait() override {}
    bool done() const override { return true; }

    OperationWatchdog& watchdog;
    Operation operation;
    uint64_t sequence;
  };
  return std::make_shared<Announced>(*this, operation, sequence);
}

void OperationWatchdog::end(const Operation& operation, uint64_t sequence) {
  activity_->store(fabric::Activity{operation.kind, false, sequence}.pack(),
                   std::memory_order_relaxed);
}

std::optional<std::string> OperationWatchdog::look_up(const std::string& key) const {
  try {
    return store_->find(key);
  } catch (const std::exception& error) {
    throw RendezvousGone(format("rank {} of group '{}': the job's rendezvous server is gone: {}",
                                rank_, name_, error.what()));
  }
}

// Members that have not reached this operation, as far as they have reported.
std::vector<OperationWatchdog::Peer> OperationWatchdog::behind(const Operation& operation,
                                                               uint64_t sequence) const {
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

void OperationWatchdog::fail(std::exception_ptr error, bool all_know) {
  bool is_first = false;
  {
    const std::lock_guard lock(failure_->mutex);
    is_first = !std::exchange(failure_->was_thrown, true);
    if (!failure_->error) failure_->error = error;
  }
  tell_failure(*store_, name_, rank_, error);
  if (hosts_rendezvous_ && is_first && !all_know) let_others_hear(*store_);
  std::rethrow_exception(error);
}

std::vector<uint32_t> OperationWatchdog::check_agreement(
    const Operation& operation, uint64_t sequence,
    const std::function<void(const std::shared_ptr<Records>&)>& exchange,
    std::vector<uint32_t> sums) const {
  const auto size = members_.size();
  sums.resize(size);
  // The record's own checksum is the last of them; what follows it keeps the next record aligned.
  const size_t counts_at = sizeof(fabric::Signature),
               sums_at = counts_at + 2 * size * sizeof(int64_t),
               sum_at = sums_at + size * sizeof(uint32_t),
               record_size = sums_at + (size + 2) / 2 * 2 * sizeof(uint32_t);
  const auto records = std::make_shared<Records>();
  records->mine.resize(record_size);
  records->all.resize(size * record_size);
  const fabric::Signature signature = fabric::signature_of(operation);
  std::memcpy(records->mine.data(), &signature, sizeof signature);
  const auto put = [&](const std::vector<int64_t>& counts, size_t at) {
    if (!counts.empty())
      std::memcpy(records->mine.data() + counts_at + at * sizeof(int64_t), counts.data(),
                  counts.size() * sizeof(int64_t));
  };
  put(operation.send_counts, 0);
  put(operation.recv_counts, size);
  std::memcpy(records->mine.data() + sums_at, sums.data(), size * sizeof(uint32_t));
  const uint32_t sum = io::crc32c(std::span(records->mine).first(sum_at));
  std::memcpy(records->mine.data() + sum_at, &sum, sizeof sum);
  exchange(records);
  const auto record = [&](int rank) {
    return records->all.data() + static_cast<size_t>(rank) * record_size;
  };
  const auto sum_in = [&](int rank, size_t at) {
    uint32_t value = 0;
    std::memcpy(&value, record(rank) + at, sizeof value);
    return value;
  };
  for (int peer = 0; peer < static_cast<int>(size); ++peer) {
    if (peer != rank_)
      arrivals_->check(operation, sequence, peer, {record(peer), sum_at}, sum_in(peer, sum_at),
                       "description of the call");
    sums[static_cast<size_t>(peer)] =
        sum_in(peer, sums_at + static_cast<size_t>(rank_) * sizeof(uint32_t));
  }
  fabric::check_agreement(
      {name_, sequence, static_cast<int>(size),
       [&](int rank) -> const fabric::Signature& {
         return *reinterpret_cast<const fabric::Signature*>(record(rank));
       },
       [&](int rank) { return reinterpret_cast<const int64_t*>(record(rank) + counts_at); }});
  return sums;
}

void OperationWatchdog::throw_if_told() const {
  if (const auto failure = look_up(failure_key(name_))) RankError::parse(*failure).raise();
}

void OperationWatchdog::throw_if_lost(const Operation& operation, uint64_t sequence) const {
  throw_if_told();
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

std::string OperationWatchdog::describe_wait(const Operation& operation, uint64_t sequence,
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

void OperationWatchdog::wait(const Operation& operation, uint64_t sequence,
                             Clock::time_point started,
                             const std::function<bool(milliseconds)>& poll) const {
  bool warned = false;
  // Rank 0 hosts the rendezvous, or the launcher does. A group that rank 0 is not in outlives
  // it.
  const bool needs_host = std::find(members_.begin(), members_.end(), 0) != members_.end();
  std::optional<Clock::time_point> alone_since;
  milliseconds slice = kFirstLook;
  const auto left = [&] {
    return std::chrono::ceil<milliseconds>(started + operation.timeout - Clock::now());
  };
  while (!poll(std::max(milliseconds{1}, std::min(slice, left())))) {
    slice = kLookInterval;
    try {
      throw_if_lost(operation, sequence);
    } catch (const RendezvousGone&) {
      // The rank that hosts it may have finished and left, its part of this operation done: what
      // it has sent is still on its way.
      if (!alone_since) alone_since = Clock::now();
      const bool is_long = needs_host && Clock::now() - *alone_since > kAlone;
      if (is_long || left() <= milliseconds{0}) throw;
      continue;
    }
    if (left() <= milliseconds{0}) {
      throw TimeoutError(describe_wait(operation, sequence, seconds_since(started)) +
                         "; that is the deadline");
    }
    if (!warned && Clock::now() - started >= std::max(kWarnAfter, operation.timeout / 15)) {
      warned = true;
      if (!launcher_watches_) log::warn(describe_wait(operation, sequence, seconds_since(started)));
      flight::dump_own();
    }
  }
}

void OperationWatchdog::wait_for(Pending& agreement) const {
  try {
    agreement.wait();
  } catch (const CommError& error) {
    if (typeid(error) == typeid(CommError)) throw_if_told();
    throw;
  }
}

void OperationWatchdog::explain(const Operation& operation, uint64_t sequence,
                                const std::string& words) const {
  // The engine may notice a death before the rendezvous does: give that, and the others'
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
