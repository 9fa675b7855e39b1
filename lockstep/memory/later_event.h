// SPDX-License-Identifier: Apache-2.0
// A point in a queue that another thread has yet to reach with its work. Private: not installed.
#pragma once

#include <memory>
#include <utility>

#include "lockstep/memory/queue.h"

namespace lockstep::memory {

// Work that another thread will queue: waiting means until it was queued, and then for the work.
class LaterEvent {
 public:
  // By the thread that queues, once.
  void set(Event event) { state_->event = std::move(event); }
  // `queued`: after set().
  Event after(Event queued) const {
    return Event(std::make_shared<Impl>(state_, std::move(queued)));
  }

 private:
  struct State {
    Event event;
  };
  class Impl final : public Event::Impl {
   public:
    Impl(std::shared_ptr<State> state, Event queued)
        : state_(std::move(state)), queued_(std::move(queued)) {}
    bool passed() const override { return queued_.passed() && state_->event.passed(); }
    void wait() const override {
      queued_.wait();
      state_->event.wait();
    }
    void* cuda_event() const override {
      queued_.wait();
      return state_->event.cuda_event();
    }

   private:
    std::shared_ptr<State> state_;
    Event queued_;
  };

  std::shared_ptr<State> state_ = std::make_shared<State>();
};

}  // namespace lockstep::memory
