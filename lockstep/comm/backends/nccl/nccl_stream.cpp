// SPDX-License-Identifier: Apache-2.0
#include "lockstep/comm/backends/nccl/nccl_stream.h"

#include <algorithm>
#include <chrono>
#include <future>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/log.h"
#include "lockstep/core/trace.h"
#include "lockstep/flight/recorder.h"

namespace lockstep::comm::nccl {
namespace {

// Between two looks at what runs: short for what is over soon, and long for what is not.
constexpr milliseconds kFirstPause{1}, kLongestPause{20};
// What an aborted communicator still runs ends within this time.
constexpr milliseconds kLastWords{5000};

// The group is broken already, and the operation that broke it has said why.
struct Aborted {};

}  // namespace

Events::~Events() {
  for (const auto& kind : free_) {
    for (CUevent_st* event : kind) runtime_.free_event(event);
  }
}

Events::Handle Events::take(bool timed) {
  CUevent_st* event = nullptr;
  {
    const std::lock_guard lock(mutex_);
    auto& free = free_[timed ? 1 : 0];
    if (!free.empty()) {
      event = free.back();
      free.pop_back();
    }
  }
  if (event == nullptr) event = runtime_.make_event(timed);
  return {event, [self = shared_from_this(), timed](CUevent_st* used) {
            const std::lock_guard lock(self->mutex_);
            self->free_[timed ? 1 : 0].push_back(used);
          }};
}

NcclStream::NcclStream(std::shared_ptr<Communicator> communicator, Options options)
    : communicator_(std::move(communicator)),
      runtime_(*communicator_->engine().runtime),
      options_(std::move(options)),
      events_(std::make_shared<Events>(runtime_)),
      thread_([this](const std::stop_token& stop) { run(stop); }) {}

NcclStream::~NcclStream() { finish(); }

void NcclStream::finish() {
  thread_.request_stop();
  if (thread_.joinable()) thread_.join();
  if (!std::exchange(has_frees_, false)) return;
  const auto freed = std::make_shared<std::promise<void>>();
  frees_.post([freed] { freed->set_value(); });
  freed->get_future().wait_for(kLastWords);
}

// Notes where the caller's stream is.
std::shared_ptr<Ticket> NcclStream::accept(Ticket ticket) {
  const DeviceGuard guard(runtime_, communicator_->device());
  ticket.from = runtime_.current_stream(communicator_->device());
  ticket.ready = events_->take(false);
  runtime_.record(ticket.ready.get(), ticket.from);
  return std::make_shared<Ticket>(std::move(ticket));
}

std::shared_ptr<Ticket> NcclStream::launch(Ticket handed_in) {
  const auto ticket = accept(std::move(handed_in));
  start(*ticket);
  const std::lock_guard lock(mutex_);
  ticket->launched = true;
  in_flight_.push_back(ticket);
  changed_.notify_all();
  return ticket;
}

std::shared_ptr<Ticket> NcclStream::post(Ticket handed_in) {
  const auto ticket = accept(std::move(handed_in));
  const std::lock_guard lock(mutex_);
  posted_.push_back(ticket);
  changed_.notify_all();
  return ticket;
}

bool NcclStream::has_posted() const {
  const std::lock_guard lock(mutex_);
  return !posted_.empty();
}

void NcclStream::connect(const UniqueId& id, int rank, int size, const fabric::Operation& operation,
                         uint64_t sequence) {
  try {
    communicator_->begin(id, rank, size);
  } catch (const CommError& error) {
    options_.watchdog.explain(operation, sequence, error.what());
  }
  settle(operation, sequence);
}

// Returns when what NCCL was asked for has been taken over by the stream.
void NcclStream::settle(const fabric::Operation& operation, uint64_t sequence) {
  options_.watchdog.wait(operation, sequence, Clock::now(), [&](milliseconds time) {
    milliseconds pause{1};
    try {
      for (const Deadline deadline(time); !communicator_->is_settled();) {
        if (deadline.passed()) return false;
        Lock lock(mutex_);
        changed_.wait_for(lock, pause);
      }
    } catch (const CommError& error) {
      options_.watchdog.explain(operation, sequence, error.what());
    }
    return true;
  });
}

// Gives the operation to the stream.
void NcclStream::start(Ticket& ticket) {
  const std::lock_guard one_at_a_time(launching_);
  const DeviceGuard guard(runtime_, communicator_->device());
  const bool traced = trace::enabled();
  CUstream_st* const stream = communicator_->stream();
  if (traced) set_base();
  runtime_.wait(stream, ticket.ready.get());
  if (traced) {
    ticket.begin = events_->take(true);
    runtime_.record(ticket.begin.get(), stream);
  }
  bool settled = false;
  try {
    settled = communicator_->call(
        [&](const Seat& seat) { return issue(communicator_->engine(), seat, ticket.operation); });
  } catch (const CommError& error) {
    options_.watchdog.explain(ticket.operation, ticket.sequence, error.what());
  }
  // Until then the stream does not have it, and an event would say that it is over.
  if (!settled) settle(ticket.operation, ticket.sequence);
  if (auto last = std::exchange(ticket.operation.finish, nullptr)) {
    runtime_.give(stream, communicator_->device(), last);
    // What it holds lives until the stream is done with it, as what the operation uses does.
    ticket.memory = std::make_shared<std::pair<std::shared_ptr<const void>, std::function<void()>>>(
        std::move(ticket.memory), std::move(last));
  }
  ticket.done = events_->take(traced);
  runtime_.record(ticket.done.get(), stream);
}

void NcclStream::wait(Ticket& ticket) {
  {
    Lock lock(mutex_);
    changed_.wait(lock, [&] { return ticket.launched || aborted_; });
  }
  options_.watchdog.throw_if_failed();
  check(ticket.launched, "an operation of a broken group was waited for");
  CUstream_st* const stream = runtime_.current_stream(communicator_->device());
  runtime_.wait(stream, ticket.done.get());
  options_.watchdog.throw_if_failed();
  // Whatever this stream does from now on comes after the operation; another one's memory is freed
  // by the thread.
  std::shared_ptr<const void> unused;
  const std::lock_guard lock(mutex_);
  if (stream == ticket.from) unused = std::exchange(ticket.memory, nullptr);
}

bool NcclStream::done(const Ticket& ticket) const {
  {
    const std::lock_guard lock(mutex_);
    if (aborted_) return true;
    if (!ticket.launched) return false;
  }
  return runtime_.passed(ticket.done.get());
}

void NcclStream::abort() noexcept {
  {
    const std::lock_guard lock(mutex_);
    aborted_ = true;
    changed_.notify_all();
  }
  communicator_->abort();
}

// ---- the thread ----

void NcclStream::run(const std::stop_token& stop) {
  try {
    runtime_.exchange_device(communicator_->device());
    Lock lock(mutex_);
    for (;;) {
      const auto is_busy = [this] { return !posted_.empty() || !in_flight_.empty(); };
      if (!changed_.wait(lock, stop, is_busy)) return;
      if (launch_posted(lock)) continue;
      const std::shared_ptr<Ticket> oldest = in_flight_.front();
      lock.unlock();
      follow(*oldest);
      retire(*oldest);
      lock.lock();
      in_flight_.pop_front();
    }
  } catch (const Aborted&) {
  } catch (...) {
    options_.fail(std::current_exception());
  }
  let_go();
}

// Launches the first one that waits for that; false if there is none.
bool NcclStream::launch_posted(Lock& lock) {
  if (posted_.empty()) return false;
  if (aborted_) throw Aborted{};
  const std::shared_ptr<Ticket> ticket = posted_.front();
  lock.unlock();
  if (const auto agreed = std::exchange(ticket->agreed, nullptr))
    options_.watchdog.wait_for(*agreed);
  if (options_.prepare) options_.prepare(*ticket);
  start(*ticket);
  lock.lock();
  posted_.pop_front();
  ticket->launched = true;
  in_flight_.push_back(ticket);
  changed_.notify_all();
  return true;
}

// Returns when the operation is over. Its deadline counts from when the caller's stream got to it:
// computing may take as long as it likes.
void NcclStream::follow(const Ticket& ticket) {
  milliseconds pause = kFirstPause;
  while (!has_passed(ticket.ready, kLongestPause, pause, ticket)) continue;
  pause = kFirstPause;
  options_.watchdog.wait(ticket.operation, ticket.sequence, Clock::now(), [&](milliseconds time) {
    return has_passed(ticket.done, time, pause, ticket);
  });
}

// Looks for at most `time`; launches what comes in meanwhile.
bool NcclStream::has_passed(const Events::Handle& event, milliseconds time, milliseconds& pause,
                            const Ticket& ticket) {
  for (const Deadline deadline(time); !runtime_.passed(event.get());) {
    try {
      communicator_->is_settled();
    } catch (const CommError& error) {
      options_.watchdog.explain(ticket.operation, ticket.sequence, error.what());
    }
    Lock lock(mutex_);
    if (aborted_) throw Aborted{};
    if (launch_posted(lock)) continue;
    if (deadline.passed()) return false;
    changed_.wait_for(lock, std::min(pause, deadline.left()),
                      [this] { return aborted_ || !posted_.empty(); });
    pause = std::min(2 * pause, kLongestPause);
  }
  return true;
}

void NcclStream::retire(Ticket& ticket) {
  options_.watchdog.end(ticket.operation, ticket.sequence);
  flight::end(ticket.operation.record, Clock::now());
  if (ticket.begin)
    options_.trace.add(ticket.operation, ticket.sequence, time_of(ticket.begin),
                       time_of(ticket.done));
  std::shared_ptr<const void> unused;
  {
    const std::lock_guard lock(mutex_);
    unused = std::exchange(ticket.memory, nullptr);
  }
  // NCCL's memory waits for the device, which may wait for what this thread has to watch.
  if (!unused) return;
  frees_.post([memory = std::move(unused), runtime = &runtime_,
               device = communicator_->device()]() mutable {
    runtime->exchange_device(device);  // or the first one gets a context
    memory.reset();
  });
  has_frees_ = true;
}

// After an abort: kernels that were running come to an end, and then the memory is unused.
void NcclStream::let_go() {
  Lock lock(mutex_);
  const auto is_over = [this] {
    return std::all_of(in_flight_.begin(), in_flight_.end(),
                       [this](const auto& ticket) { return runtime_.passed(ticket->done.get()); });
  };
  try {
    for (const Deadline deadline(kLastWords); !is_over() && !deadline.passed();)
      changed_.wait_for(lock, kLongestPause);
  } catch (const std::exception& error) {
    log::debug(format("[nccl] after an abort: {}", error.what()));
  }
  const auto unused = std::pair(std::move(posted_), std::move(in_flight_));
  posted_.clear();
  in_flight_.clear();
  aborted_ = true;
  changed_.notify_all();
  lock.unlock();
}

Clock::time_point NcclStream::time_of(const Events::Handle& event) const {
  const double elapsed = runtime_.milliseconds_between(base_.get(), event.get());
  return base_time_ + std::chrono::duration_cast<Clock::duration>(
                          std::chrono::duration<double, std::milli>(elapsed));
}

// Times are counted from an event; floats, and clocks that drift: from a new one where nothing has
// to be waited for.
void NcclStream::set_base() {
  {
    const std::lock_guard lock(mutex_);
    if (base_ && (!in_flight_.empty() || seconds_since(base_time_) < 1)) return;
  }
  Events::Handle base = events_->take(true);
  runtime_.record(base.get(), communicator_->stream());
  runtime_.synchronize(base.get());
  base_ = std::move(base);
  base_time_ = Clock::now();
}

}  // namespace lockstep::comm::nccl
