// SPDX-License-Identifier: Apache-2.0
#include "lockstep/checkpoint/background_saver.h"

#include <ATen/ATen.h>

#include <exception>
#include <future>
#include <optional>
#include <utility>

#include "lockstep/checkpoint/host_copy.h"
#include "lockstep/checkpoint/write_slices.h"
#include "lockstep/comm/control/rank_texts.h"
#include "lockstep/comm/work.h"
#include "lockstep/core/clock.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/log.h"
#include "lockstep/core/trace.h"

namespace lockstep::checkpoint {

class Saver::Writer {
 public:
  Writer(std::string dir, const comm::Group& group, SaverOptions options)
      : dir_(std::move(dir)),
        options_(options),
        group_(group),
        writers_(options.background && group.size() > 1 ? group.split(0, group.rank()) : group) {}

  ~Writer() { join(); }

  bool save(const SaveRequest& request, WhenBusy when_busy) {
    const auto start = Clock::now();
    if (when_busy == WhenBusy::skip && any_busy()) return false;
    join();
    // A job that has lost its folder would train on and keep nothing.
    comm::run_on_all_ranks("save", group_, [&]() -> std::string {
      try {
        if (lock_) lock_->renew();
      } catch (const io::LockLost&) {
        throw;
      } catch (const Error&) {  // the save that follows will tell
      }
      return "";
    });
    SaveRequest mine = detail::share_of(request, group_);
    if (!options_.background) {
      write(mine, start, [&](size_t slice, const detail::Sink& sink) {
        detail::give_bytes(mine.slices[slice].tensor, sink);
      });
      return true;
    }
    comm::run_on_all_ranks("save", group_, [&]() -> std::string {
      const trace::Span span("checkpoint", "copy to host");
      copy_.take(mine.slices);
      return "";
    });
    // Of the tensors only the types are needed from here on.
    for (NamedSlice& slice : mine.slices) {
      slice = {slice.placement, at::empty({0}, slice.tensor.scalar_type())};
    }
    waited_ = seconds_since(start);
    running_ = std::async(std::launch::async, [this, start, mine = std::move(mine)] {
      const comm::ExcludeBlockedTime exclude;  // no training waits here
      trace::name_thread(group_.rank(), "checkpoint");
      write(mine, start, [&](size_t slice, const detail::Sink& sink) { copy_.bytes(slice, sink); });
    });
    return true;
  }

  void lock() {
    join();
    comm::run_on_all_ranks("lock", group_, [&]() -> std::string {
      if (group_.rank() == 0) detail::take_lock(lock_, dir_);
      return "";
    });
  }

  void reserve(const std::vector<NamedSlice>& slices) {
    if (!options_.background) return;
    join();
    const SaveRequest mine = detail::share_of({.slices = slices}, group_);
    comm::run_on_all_ranks("reserve", group_, [&]() -> std::string {
      copy_.reserve(mine.slices);
      return "";
    });
  }

  void wait() {
    join();
    if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
  }

  std::vector<SaveResult> take_finished() {
    if (!busy()) join();
    return std::exchange(finished_, {});
  }

 private:
  bool busy() const {
    return running_.valid() && running_.wait_for(milliseconds{0}) != std::future_status::ready;
  }
  void join() {
    if (running_.valid()) running_.get();
    if (saved_) finished_.push_back(*std::exchange(saved_, std::nullopt));
  }
  // Ranks end a save at almost the same time; what one of them sees must hold for all.
  bool any_busy() const {
    const auto all = comm::run_on_all_ranks("save", group_,
                                            [&]() -> std::string { return busy() ? "busy" : ""; });
    for (const std::string& text : all) {
      if (!text.empty()) return true;
    }
    return false;
  }

  void write(const SaveRequest& mine, Clock::time_point start, const detail::Bytes& bytes) {
    const trace::Span span("checkpoint", "write");
    SaveResult saved{.step = mine.step};
    failure_ = nullptr;
    try {
      saved.path = detail::write(lock_, dir_, mine, bytes, writers_);
    } catch (const std::exception& error) {
      failure_ = std::current_exception();
      saved.error = error.what();
      if (group_.rank() == 0)
        log::warn(format("step {} was not saved: {}", mine.step, saved.error));
      if (!options_.background && dynamic_cast<const CommError*>(&error) != nullptr) throw;
    }
    saved.seconds = seconds_since(start);
    saved.waited = options_.background ? waited_ : saved.seconds;
    saved_ = std::move(saved);
  }

  const std::string dir_;
  const SaverOptions options_;
  const comm::Group group_;
  const comm::Group writers_;  // the same ranks; the thread's, while training uses the other
  detail::Lock lock_;          // the thread's while it runs
  detail::HostCopy copy_;
  double waited_ = 0;
  std::vector<SaveResult> finished_;
  // Written by the thread, read once it has ended.
  std::optional<SaveResult> saved_;
  std::exception_ptr failure_;
  std::future<void> running_;
};

Saver::Saver(std::string dir, const comm::Group& group, SaverOptions options)
    : writer_(std::make_unique<Writer>(std::move(dir), group, options)) {}

Saver::~Saver() = default;

void Saver::lock() { writer_->lock(); }

bool Saver::save(const SaveRequest& request, WhenBusy when_busy) {
  return writer_->save(request, when_busy);
}

void Saver::reserve(const std::vector<NamedSlice>& slices) { writer_->reserve(slices); }

void Saver::wait() { writer_->wait(); }

std::vector<SaveResult> Saver::take_finished() { return writer_->take_finished(); }

}  // namespace lockstep::checkpoint
