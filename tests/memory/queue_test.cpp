// SPDX-License-Identifier: Apache-2.0
#include "lockstep/memory/queue.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <future>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/core/trace.h"
#include "lockstep/memory/paced_queue.h"
#include "tests/support/subprocess.h"
#include "tests/support/trace_spans.h"

// Its program's main() is in comm/overlap_test.cpp, and sets LOCKSTEP_TRACE.
namespace lockstep::memory {
namespace {

using nlohmann::json;
using testing::ElementsAre;
using testing::ThrowsMessage;

const c10::Device kCpu(c10::kCPU);

std::shared_ptr<Queue> queue_of(const std::string& name = "queue") {
  return make_queue(kCpu, {.rank = 3, .name = name});
}

// Holds a queue up until it is opened.
class Gate {
 public:
  void hold(Queue& queue) {
    queue.run([opened = opened_.get_future().share()] { opened.wait(); }, "gate");
  }
  void open() { opened_.set_value(); }

 private:
  std::promise<void> opened_;
};

TEST(Queue, CopiesInOrder) {
  const auto queue = queue_of();
  std::vector<int> a(100'000), b(a.size()), c(a.size());
  std::iota(a.begin(), a.end(), 1);
  queue->copy(b.data(), a.data(), a.size() * sizeof(int), "a");
  queue->copy(c.data(), b.data(), a.size() * sizeof(int), "b");
  queue->copy(nullptr, nullptr, 0, "nothing");
  queue->record().wait();
  EXPECT_EQ(c, a);
  EXPECT_EQ(queue->stream(), nullptr);
}

TEST(Queue, RunsInOrderBesideTheCaller) {
  const auto queue = queue_of();
  Gate gate;
  gate.hold(*queue);
  std::vector<int> order;
  for (int i = 0; i < 4; ++i) queue->run([&order, i] { order.push_back(i); }, "work");
  const Event done = queue->record();
  EXPECT_FALSE(done.passed());
  gate.open();
  done.wait();
  EXPECT_TRUE(done.passed());
  done.wait();
  EXPECT_THAT(order, ElementsAre(0, 1, 2, 3));
}

TEST(Queue, AnEventIsPassedBeforeWhatIsQueuedLater) {
  const auto queue = queue_of();
  const Event empty = queue->record();
  Gate gate;
  gate.hold(*queue);
  empty.wait();
  EXPECT_FALSE(queue->record().passed());
  gate.open();
}

TEST(Queue, WorkIsDestroyedWhenItIsDone) {
  const auto queue = queue_of();
  auto kept = std::make_shared<int>(1);
  const std::weak_ptr<int> seen = kept;
  queue->run([kept = std::move(kept)] {}, "work");
  queue->record().wait();
  EXPECT_TRUE(seen.expired());
}

TEST(Queue, QueuesWaitForEachOther) {
  const auto first = queue_of("first"), second = queue_of("second");
  Gate gate;
  gate.hold(*first);
  std::vector<int> order;
  first->run([&] { order.push_back(1); }, "one");
  second->wait(first->record());
  second->run([&] { order.push_back(2); }, "two");
  first->wait(second->record());
  first->run([&] { order.push_back(3); }, "three");
  const Event last = first->record();
  EXPECT_FALSE(last.passed());
  gate.open();
  last.wait();
  EXPECT_THAT(order, ElementsAre(1, 2, 3));
}

TEST(Queue, AnEventOutlivesItsQueue) {
  Event event;
  EXPECT_TRUE(event.passed());  // the default one
  event.wait();
  EXPECT_EQ(event.cuda_event(), nullptr);
  event = queue_of()->record();
  EXPECT_TRUE(event.passed());
  event.wait();
}

TEST(Queue, IsDestroyedWhenEverythingIsDone) {
  Gate gate;
  int done = 0;
  auto queue = queue_of();
  gate.hold(*queue);
  for (int i = 0; i < 10; ++i) queue->run([&] { ++done; }, "work");
  std::promise<void> begins;
  std::jthread opener([&, begun = begins.get_future()] {
    begun.wait();
    gate.open();
  });
  begins.set_value();
  queue.reset();
  EXPECT_EQ(done, 10);
}

TEST(Queue, TheFirstErrorStays) {
  const auto queue = queue_of();
  int ran = 0;
  queue->run([&] { ++ran; }, "works");
  const Event before = queue->record();
  queue->run([] { throw std::runtime_error("no disk"); }, "fails");
  const Event after = queue->record();
  queue->run([&] { ++ran; }, "left out");
  int from = 1, to = 0;
  queue->copy(&to, &from, sizeof(int), "left out");
  queue->run([] { throw std::runtime_error("another"); }, "left out");
  const Event last = queue->record();
  EXPECT_NO_THROW(before.wait());
  for (const Event& event : {after, last, after}) {
    EXPECT_THAT([&] { event.wait(); }, ThrowsMessage<std::runtime_error>("no disk"));
    EXPECT_TRUE(event.passed());
  }
  EXPECT_THAT([&] { compute_after(last, kCpu); }, ThrowsMessage<std::runtime_error>("no disk"));
  EXPECT_EQ(ran, 1);
  EXPECT_EQ(to, 0);
}

TEST(Queue, AnErrorGoesOnToQueuesThatWait) {
  const auto first = queue_of("first"), second = queue_of("second"), third = queue_of("third");
  first->run([] { throw std::runtime_error("no disk"); }, "fails");
  const Event failed = first->record();
  bool ran = false;
  second->wait(failed);
  second->run([&] { ran = true; }, "left out");
  EXPECT_THAT([&] { second->record().wait(); }, ThrowsMessage<std::runtime_error>("no disk"));
  // Whether it waited or came late.
  third->wait(failed);
  third->run([&] { ran = true; }, "left out");
  EXPECT_THAT([&] { third->record().wait(); }, ThrowsMessage<std::runtime_error>("no disk"));
  EXPECT_FALSE(ran);
}

TEST(Queue, ManyThreadsQueue) {
  const auto queue = queue_of();
  std::vector<int> last(4, -1), wrong(4);
  {
    std::vector<std::jthread> threads;
    for (size_t t = 0; t < last.size(); ++t) {
      threads.emplace_back([&, t] {
        for (int i = 0; i < 500; ++i) {
          queue->run([&, t, i] { wrong[t] += std::exchange(last[t], i) == i - 1 ? 0 : 1; }, "x");
          if (i % 100 == 0) queue->record().wait();
        }
      });
    }
  }
  queue->record().wait();
  EXPECT_THAT(last, testing::Each(499));
  EXPECT_THAT(wrong, testing::Each(0));
}

TEST(Queue, ComputationComesAfterAnEvent) {
  const auto queue = make_host_queue({});
  EXPECT_TRUE(computed(kCpu).passed());
  Gate gate;
  gate.hold(*queue);
  int value = 0;
  queue->run([&] { value = 7; }, "work");
  const Event event = queue->record();
  std::jthread opener([&] { gate.open(); });
  compute_after(event, kCpu);
  EXPECT_EQ(value, 7);
}

// Each row is a queue's, named as it was asked for.
std::string row_of(const json& events, const json& span) {
  for (const auto& event : events) {
    if (event["ph"] == "M" && event["name"] == "thread_name" && event["tid"] == span["tid"] &&
        event["pid"] == span["pid"])
      return event["args"]["name"];
  }
  return "";
}

class NotYet : public Event::Impl {
 public:
  bool passed() const override { return false; }
  void wait() const override {}
};

TEST(Queue, AppearsInTheTrace) {
  std::vector<char> from(12'345), to(from.size());
  {
    const auto in = queue_of("to device"), cpu = queue_of("updates");
    in->copy(to.data(), from.data(), from.size(), "parameters of blocks.5");
    in->wait(Event());  // does not take time, so it is not seen
    cpu->wait(Event(std::make_shared<NotYet>()));
    cpu->run([] {}, "update of blocks.5");
  }
  trace::flush();
  const json events = test::read_trace(std::getenv("LOCKSTEP_TRACE"));
  std::vector<std::string> seen;
  for (const auto& event : events) {
    if (event["ph"] != "X" || event["pid"] != 3) continue;
    const std::string row = row_of(events, event);
    if (row != "to device" && row != "updates") continue;
    seen.push_back(row + ": " + event["cat"].get<std::string>() + ", " +
                   event["name"].get<std::string>() + " " + event["args"].dump());
  }
  EXPECT_THAT(seen, testing::UnorderedElementsAre(
                        "to device: transfer, parameters of blocks.5 {\"bytes\":12345}",
                        "updates: wait, wait {}", "updates: update, update of blocks.5 {}"));
}

// Memory that is freed when the event has passed may be read by what the event's queue waited for.
TEST(Queue, EventsAfterAFailureStillWaitForOtherQueues) {
  const auto first = queue_of("first"), second = queue_of("second");
  Gate gate;
  gate.hold(*first);
  second->run([] { throw std::runtime_error("no luck"); }, "");
  second->wait(first->record());
  const Event failed = second->record();
  for (int i = 0; i < 1000 && !failed.passed(); ++i) std::this_thread::yield();
  EXPECT_FALSE(failed.passed());
  gate.open();
  EXPECT_THROW(failed.wait(), std::runtime_error);
}

// Knows how many copies it was given.
class Counting final : public Queue {
 public:
  explicit Counting(std::shared_ptr<Queue> queue) : queue_(std::move(queue)) {}
  void copy(void* to, const void* from, size_t bytes, std::string_view what) override {
    queue_->copy(to, from, bytes, what);
    ++copies;
    copies.notify_all();
  }
  void run(std::function<void()> work, std::string_view what) override {
    queue_->run(std::move(work), what);
  }
  void wait(const Event& event) override { queue_->wait(event); }
  Event record() override { return queue_->record(); }

  std::atomic<int> copies = 0;

 private:
  std::shared_ptr<Queue> queue_;
};

TEST(PacedQueue, HandsOverTwoCopiesAtATime) {
  const auto inner = std::make_shared<Counting>(queue_of());
  Gate gate;
  gate.hold(*inner);
  const auto paced = detail::make_paced_queue(inner, nullptr, {.name = "paced"});
  std::vector<int> numbers(6);
  numbers[0] = 1;
  for (size_t i = 0; i + 1 < numbers.size(); ++i)
    paced->copy(&numbers[i + 1], &numbers[i], sizeof(int), "a number");
  const Event done = paced->record();
  for (int seen = 0; seen < 2; seen = inner->copies) inner->copies.wait(seen);
  EXPECT_FALSE(done.passed());
  EXPECT_EQ(inner->copies, 2);
  gate.open();
  done.wait();
  EXPECT_TRUE(done.passed());
  EXPECT_EQ(inner->copies, 5);
  EXPECT_EQ(numbers.back(), 1);
}

TEST(PacedQueue, EventsAfterAFailureWaitForWhatWasHandedOver) {
  const auto inner = std::make_shared<Counting>(queue_of());
  const auto other = queue_of("other");
  Gate gate;
  gate.hold(*inner);
  const auto paced = detail::make_paced_queue(inner, nullptr, {.name = "paced"});
  int from = 7, to = 0;
  paced->copy(&to, &from, sizeof(int), "a number");
  other->run([] { throw std::runtime_error("no luck"); }, "");
  paced->wait(other->record());
  paced->copy(&from, &to, sizeof(int), "left out");
  const Event failed = paced->record();
  EXPECT_THROW(failed.cuda_event(), std::runtime_error);  // returns when the thread has come there
  EXPECT_FALSE(failed.passed());
  gate.open();
  EXPECT_THROW(failed.wait(), std::runtime_error);
  EXPECT_TRUE(failed.passed());
  EXPECT_EQ(to, 7);
  EXPECT_EQ(inner->copies, 1);
}

TEST(PacedQueue, LetsTheOtherGoFirst) {
  const auto inner = std::make_shared<Counting>(queue_of());
  const auto other = std::make_shared<Counting>(queue_of());
  Gate gate;
  gate.hold(*other);
  const auto first = detail::make_paced_queue(other, nullptr, {.name = "first"});
  const auto second = detail::make_paced_queue(inner, first, {.name = "second"});
  int from = 7, to = 0, last = 0;
  first->copy(&to, &from, sizeof(int), "a number");
  first->record().cuda_event();                       // returns when the copy was handed over
  second->copy(&last, &to, sizeof(int), "a number");  // right only after the other
  const Event done = second->record();
  EXPECT_FALSE(done.passed());
  gate.open();
  done.wait();
  EXPECT_EQ(last, 7);
}

TEST(PacedQueue, WaitsWithoutItsCaller) {
  const auto first = queue_of("first");
  Gate gate;
  gate.hold(*first);
  int from = 7, to = 0;
  const auto paced = detail::make_paced_queue(queue_of(), nullptr, {.name = "paced"});
  paced->wait(first->record());
  paced->copy(&to, &from, sizeof(int), "a number");
  const Event done = paced->record();
  EXPECT_FALSE(done.passed());
  gate.open();
  done.wait();
  EXPECT_EQ(to, 7);
}

}  // namespace
}  // namespace lockstep::memory
