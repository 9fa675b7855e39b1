// SPDX-License-Identifier: Apache-2.0
#include "lockstep/fabric/engine.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/log.h"
#include "lockstep/fabric/collectives.h"
#include "lockstep/fabric/futex.h"
#include "lockstep/fabric/point_to_point.h"
#include "lockstep/flight/recorder.h"

namespace lockstep::fabric {
namespace {

constexpr size_t kInlineBytes = 256 << 10;  // operations up to this size run on the caller's thread
constexpr size_t kSharedBytes = 4 << 20;    // from here on several threads of a rank pay
constexpr milliseconds kLookInterval{50};   // how often a sleeper looks after its peers
// Polls before a waiting thread goes to sleep: some 50 us for one that has nothing else to do, less
// for the progress thread, which takes a core from the computation.
constexpr int kWaiterSpins = 3000;
constexpr int kProgressSpins = 200;
constexpr int kYields =
    20;  // instead, where ranks outnumber cores: the rank that is awaited may need this one

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

size_t bytes_of(const Operation& operation) {
  return std::max(operation.input.size(), operation.output.size());
}

std::exception_ptr to_exception(const Failure& failure) {
  switch (failure.kind) {
    case Failure::mismatch:
      return std::make_exception_ptr(MismatchError(failure.message));
    case Failure::timeout:
      return std::make_exception_ptr(TimeoutError(failure.message));
    case Failure::peer_lost:
      return std::make_exception_ptr(PeerLost(failure.rank, failure.message));
    default:
      return std::make_exception_ptr(CommError(failure.message));
  }
}

std::string describe_activity(const Slot& slot) {
  const Activity activity = Activity::unpack(slot.activity.load(std::memory_order_relaxed));
  if (activity.sequence == 0) return "has not called any operation yet";
  return format("{} {} #{}", activity.running ? "is in" : "has finished", name_of(activity.kind),
                activity.sequence);
}

}  // namespace

Engine::Engine(Seat seat, EngineOptions options)
    : seat_(std::move(seat)), options_(std::move(options)) {
  // Ranks that outnumber the cores must not spin: the one they wait for needs the core. They give
  // it away instead.
  cores_ = sysconf(_SC_NPROCESSORS_ONLN);
  crowded_ = seat_.size() > cores_;
  spin_limit_ = crowded_ ? kYields : kWaiterSpins;
}

Engine::~Engine() {
  stopping_ = true;
  const Board& board = seat_.board();
  {
    const std::lock_guard lock(mutex_);
    work_arrived_.notify_all();
  }
  // The progress thread may sleep on this rank's own doorbell.
  Slot& mine = board.slot(seat_.rank());
  mine.doorbell.fetch_add(1);
  futex_wake_all(mine.doorbell);
  progress_thread_ = {};
  break_with(std::make_exception_ptr(CommError(
      format("group '{}' was destroyed while an operation was running", seat_.group_name()))));
  mine.state.store(SlotState::left, std::memory_order_seq_cst);
  board.ring_all();
}

std::shared_ptr<Ticket> Engine::submit(Operation operation, std::shared_ptr<const void> memory) {
  auto ticket = std::make_shared<Ticket>();
  ticket->operation = std::move(operation);
  ticket->memory = std::move(memory);
  const bool small = bytes_of(ticket->operation) <= kInlineBytes;
  const bool unhurried = ticket->operation.unhurried;

  std::unique_lock lock(mutex_);
  inbox_.push_back(ticket);
  inbox_filled_.store(true, std::memory_order_seq_cst);
  ++unfinished_;
  if (driving_) {
    seat_.board().ring(seat_.rank());
    return ticket;
  }
  if (!small) {
    wake_progress_thread();
    return ticket;
  }
  driving_ = true;
  lock.unlock();
  drive([&] { return ticket->done.load(std::memory_order_relaxed); }, unhurried ? 0 : spin_limit_,
        false);
  lock.lock();
  driving_ = false;
  // What another thread has submitted meanwhile was left to this one.
  const bool is_left_alone = unhurried && !ticket->done.load(std::memory_order_relaxed);
  if (unfinished_ > (is_left_alone ? 1 : 0)) wake_progress_thread();
  if (waiting_ > 0) work_done_.notify_all();
  return ticket;
}

void Engine::wait(Ticket& ticket) {
  if (!ticket.done.load(std::memory_order_acquire)) {
    std::optional<Crew::Loan> loan;
    if (const int helpers = helpers_for(ticket.operation); helpers > 0)
      loan.emplace(crew_, helpers);
    std::unique_lock lock(mutex_);
    ++waiting_;
    while (!ticket.done.load(std::memory_order_acquire)) {
      if (driving_) {
        work_done_.wait(lock);
        continue;
      }
      driving_ = true;
      lock.unlock();
      drive([&] { return ticket.done.load(std::memory_order_relaxed); }, spin_limit_, true);
      lock.lock();
      driving_ = false;
    }
    --waiting_;
    if (unfinished_ > 0) wake_progress_thread();
    if (waiting_ > 0) work_done_.notify_all();
  }
  if (ticket.error) std::rethrow_exception(ticket.error);
}

int Engine::helpers_for(const Operation& operation) const {
  if (!options_.threads || is_message(operation.kind) || bytes_of(operation) < kSharedBytes)
    return 0;
  return static_cast<int>(std::min<long>(options_.threads(), cores_ / seat_.size())) - 1;
}

bool Engine::is_idle() {
  std::unique_lock lock(mutex_);
  return drive_once(lock);
}

void Engine::let_go() {
  std::unique_lock lock(mutex_);
  if (!drive_once(lock)) wake_progress_thread();
}

// With mutex_ held. True if nothing is left.
bool Engine::drive_once(std::unique_lock<std::mutex>& lock) {
  if (unfinished_ > 0 && !driving_) {
    driving_ = true;
    lock.unlock();
    drive([] { return false; }, 0, false);
    lock.lock();
    driving_ = false;
    if (waiting_ > 0) work_done_.notify_all();
  }
  return unfinished_ == 0;
}

void Engine::drain() {
  std::unique_lock lock(mutex_);
  ++waiting_;
  if (unfinished_ > 0) wake_progress_thread();
  work_done_.wait(lock, [this] { return unfinished_ == 0; });
  --waiting_;
}

// With mutex_ held.
void Engine::wake_progress_thread() {
  if (!progress_thread_.joinable()) {
    progress_thread_ =
        std::jthread([this](std::stop_token stop) { progress_loop(std::move(stop)); });
  }
  work_arrived_.notify_one();
}

void Engine::progress_loop(std::stop_token stop) {
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    work_arrived_.wait(lock, stop, [this] { return stopping_ || (unfinished_ > 0 && !driving_); });
    if (stopping_ || stop.stop_requested()) return;
    driving_ = true;
    lock.unlock();
    drive(
        [this] {
          return stopping_ || (collectives_.empty() && channels_.empty() && !inbox_filled_);
        },
        std::min(spin_limit_, kProgressSpins), true);
    lock.lock();
    driving_ = false;
    if (waiting_ > 0) work_done_.notify_all();
  }
}

// Moves operations on until `satisfied`, or until nothing moves for `spins` polls and sleeping is
// not allowed.
void Engine::drive(const std::function<bool()>& satisfied, int spins, bool may_sleep) {
  int idle = 0;
  while (!satisfied()) {
    if (advance()) {
      idle = 0;
    } else if (idle < spins) {
      ++idle;
      crowded_ ? static_cast<void>(sched_yield()) : relax();
    } else if (may_sleep) {
      sleep();
    } else {
      return;
    }
  }
}

Engine::Queue& Engine::queue_of(const Operation& operation) {
  return is_message(operation.kind) ? channels_[{operation.kind, operation.root}] : collectives_;
}

void Engine::start(Ticket& ticket) {
  ticket.started = Clock::now();
  const Operation& operation = ticket.operation;
  if (is_message(operation.kind)) {
    ticket.sequence = ++next_sequence_[operation.kind];
    uint64_t& pieces = channel_pieces_[{operation.kind, operation.root}];
    const bool sends = operation.kind == OpKind::send;
    if (operation.announced) {
      ticket.task =
          sends ? announce_send(seat_, operation, pieces) : announce_recv(seat_, operation, pieces);
    } else {
      ticket.task = sends ? run_send(seat_, operation, pieces) : run_recv(seat_, operation, pieces);
    }
    seat_.show_activity(operation.kind, ticket.sequence, true);
  } else {
    ticket.sequence = seat_.sequence() + 1;
    ticket.task = run_collective(seat_, operation, crew_);
  }
}

// Puts what was submitted into the queues. True if there was anything.
bool Engine::take_inbox() {
  if (!inbox_filled_.load(std::memory_order_seq_cst)) return false;
  std::vector<std::shared_ptr<Ticket>> arrived;
  {
    const std::lock_guard lock(mutex_);
    arrived.swap(inbox_);
    inbox_filled_.store(false, std::memory_order_seq_cst);
  }
  for (auto& ticket : arrived) queue_of(ticket->operation).push_back(std::move(ticket));
  return true;
}

// Runs whatever can run. True if anything did.
bool Engine::advance() {
  bool moved = take_inbox();
  if (broken_) break_with(broken_);
  moved |= advance(collectives_);
  for (auto channel = channels_.begin(); channel != channels_.end();) {
    moved |= advance(channel->second);
    channel = channel->second.empty() ? channels_.erase(channel) : std::next(channel);
  }
  return moved;
}

bool Engine::advance(Queue& queue) {
  bool moved = false;
  while (!queue.empty()) {
    Ticket& ticket = *queue.front();
    try {
      if (ticket.started == Clock::time_point{}) {
        if (seat_.board().failure().stage.load(std::memory_order_acquire) == Failure::written) {
          std::rethrow_exception(to_exception(seat_.board().failure()));
        }
        start(ticket);
      } else if (!ticket.task.wait().ready()) {
        return moved;
      }
      ticket.task.resume();
    } catch (...) {
      break_with(std::current_exception());
      return true;
    }
    moved = true;
    if (ticket.task.done()) finish(queue, nullptr);
  }
  return moved;
}

void Engine::finish(Queue& queue, std::exception_ptr error) {
  const std::shared_ptr<Ticket> ticket = std::move(queue.front());
  queue.pop_front();
  ticket->finished = Clock::now();
  if (auto last = std::exchange(ticket->operation.finish, nullptr); last && !error) {
    try {
      last();
    } catch (...) {
      error = std::current_exception();
    }
  }
  ticket->error = std::move(error);
  if (ticket->error && ticket->memory && ticket->started != Clock::time_point{}) {
    seat_.board().keep(ticket->memory);
    seat_.retire(ticket->operation);
  }
  ticket->memory.reset();
  ticket->task = {};
  seat_.show_activity(ticket->operation.kind, ticket->sequence, false);
  if (!ticket->error && options_.on_done) options_.on_done(*ticket);
  const std::lock_guard lock(mutex_);
  --unfinished_;
  ticket->done.store(true, std::memory_order_release);
  if (waiting_ > 0) work_done_.notify_all();
}

// The group is of no further use: tells the others why and ends everything here with the same
// error.
void Engine::abort(const std::string& why) {
  const Board& board = seat_.board();
  board.fail(Failure::other, seat_.rank(), why);
  board.ring_all();
}

void Engine::break_with(std::exception_ptr error) {
  const Board& board = seat_.board();
  if (!broken_) {
    broken_ = error;
    try {
      std::rethrow_exception(error);
    } catch (const PeerLost& lost) {
      board.fail(Failure::peer_lost, lost.rank(), lost.what());
    } catch (const TimeoutError& timeout) {
      board.fail(Failure::timeout, seat_.rank(), timeout.what());
    } catch (const MismatchError& mismatch) {
      board.fail(Failure::mismatch, seat_.rank(), mismatch.what());
    } catch (const std::exception& other) {
      if (!stopping_)
        board.fail(Failure::other, seat_.rank(),
                   format("rank {} of group '{}' failed: {}", seat_.rank(), seat_.group_name(),
                          other.what()));
    }
  }
  take_inbox();
  while (!collectives_.empty()) finish(collectives_, broken_);
  for (auto& [key, queue] : channels_) {
    while (!queue.empty())
      finish(queue, broken_);  // advance() removes the empty ones: it may be iterating now
  }
}

bool Engine::anything_ready() {
  const auto ready = [](Queue& queue) {
    return !queue.empty() && queue.front()->task.wait().ready();
  };
  if (inbox_filled_.load(std::memory_order_seq_cst) || stopping_ || ready(collectives_))
    return true;
  return std::any_of(channels_.begin(), channels_.end(),
                     [&](auto& channel) { return ready(channel.second); });
}

void Engine::sleep() {
  Slot& mine = seat_.board().slot(seat_.rank());
  const uint32_t bell = mine.doorbell.load(std::memory_order_seq_cst);
  mine.sleeping.store(1, std::memory_order_seq_cst);
  if (!anything_ready()) futex_wait(mine.doorbell, bell, kLookInterval);
  mine.sleeping.store(0, std::memory_order_seq_cst);

  const Failure& failure = seat_.board().failure();
  if (failure.stage.load(std::memory_order_acquire) == Failure::written && !anything_ready()) {
    break_with(to_exception(failure));
    return;
  }
  if (Clock::now() - last_look_ < kLookInterval) return;
  last_look_ = Clock::now();
  try {
    if (!collectives_.empty()) look_after(*collectives_.front());
    for (auto& [key, queue] : channels_) {
      if (!queue.empty()) look_after(*queue.front());
    }
  } catch (...) {
    break_with(std::current_exception());
  }
}

// Throws if what this operation waits for will not come; warns, once, if it is late.
void Engine::look_after(Ticket& ticket) {
  if (ticket.started == Clock::time_point{}) return;
  Wait wait = ticket.task.wait();
  std::vector<int> late;
  for (int peer = wait.next; peer < wait.end; ++peer) {
    Wait one = wait;
    one.next = peer;
    one.end = peer + 1;
    const Slot& slot = seat_.board().slot(peer);
    const bool left = slot.state.load(std::memory_order_acquire) == SlotState::left;
    const std::string death = left             ? "has left the group"
                              : options_.probe ? options_.probe(peer)
                                               : std::string();
    if (one.ready()) continue;  // looked at after its state: what it did before it ended counts
    late.push_back(peer);
    if (!death.empty()) {
      throw PeerLost(peer, format("[{}] rank {} of group '{}': rank {} (pid {}) {}, while "
                                  "operation #{} {} waits for it; rank {} {}",
                                  name_of(ticket.operation.kind), seat_.rank(), seat_.group_name(),
                                  peer, slot.pid, death, ticket.sequence,
                                  describe(ticket.operation), peer, describe_activity(slot)));
    }
  }
  if (late.empty()) return;
  const double waited = seconds_since(ticket.started);
  const auto message = [&] {
    std::string text =
        format("[{}] rank {} of group '{}': operation #{} {} has waited {:.1f} s for rank{} {}",
               name_of(ticket.operation.kind), seat_.rank(), seat_.group_name(), ticket.sequence,
               describe(ticket.operation), waited, late.size() > 1 ? "s" : "", join(late));
    for (const int peer : late)
      text += format("; rank {} {}", peer, describe_activity(seat_.board().slot(peer)));
    return text;
  };
  if (Clock::now() - ticket.started >= ticket.operation.timeout)
    throw TimeoutError(message() + "; that is the deadline");
  // Who allows for a long wait is not surprised by one.
  const milliseconds warn_after = std::max(options_.warn_after, ticket.operation.timeout / 15);
  if (!ticket.warned && Clock::now() - ticket.started >= warn_after) {
    ticket.warned = true;
    log::warn(message());
    flight::dump_own();
  }
}

}  // namespace lockstep::fabric
