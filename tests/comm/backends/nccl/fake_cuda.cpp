// SPDX-License-Identifier: Apache-2.0
#include "tests/comm/backends/nccl/fake_cuda.h"

#include <chrono>
#include <cstring>
#include <memory>

#include "lockstep/core/clock.h"

using lockstep::Clock;

struct CUevent_st {
  struct Point {
    bool passed = false;
    Clock::time_point time;
  };
  std::shared_ptr<Point> point;  // what was recorded last; guarded by `mutex`
};

namespace lockstep::comm::fake {
namespace {

std::mutex mutex;  // of all events
std::condition_variable changed;

void pass(const std::shared_ptr<CUevent_st::Point>& point) {
  const std::lock_guard lock(mutex);
  point->passed = true;
  point->time = Clock::now();
  changed.notify_all();
}
void record(CUevent_st* event, CUstream_st* stream) {
  auto point = std::make_shared<CUevent_st::Point>();
  {
    const std::lock_guard lock(mutex);
    event->point = point;
  }
  if (stream == nullptr) return pass(point);
  stream->add([point] { pass(point); });
}
void wait_for(const std::shared_ptr<CUevent_st::Point>& point) {
  std::unique_lock lock(mutex);
  changed.wait(lock, [&] { return point->passed; });
}
std::shared_ptr<CUevent_st::Point> point_of(CUevent_st* event) {
  const std::lock_guard lock(mutex);
  return event->point;
}
void wait(CUstream_st* stream, CUevent_st* event) {
  const auto point = point_of(event);
  if (stream == nullptr) return wait_for(point);
  stream->add([point] { wait_for(point); });
}

}  // namespace

const nccl::Runtime kRuntime{
    .devices = [] { return std::vector<std::string>{"fake"}; },
    .device_of = [](const at::Tensor& tensor) { return tensor.is_cpu() ? 0 : -1; },
    .torch_device = [](int) { return c10::Device(c10::kCPU); },
    .exchange_device = [](int) { return 0; },
    .make_stream = [] { return new CUstream_st; },
    .free_stream = [](CUstream_st* stream) { delete stream; },
    .current_stream = [](int) -> CUstream_st* { return nullptr; },
    .copy = [](void* to, const void* from, size_t bytes,
               CUstream_st* stream) { stream->add([=] { std::memcpy(to, from, bytes); }); },
    .give = [](CUstream_st* stream, int, const std::function<void()>& body) { stream->add(body); },
    .make_event = [](bool) { return new CUevent_st; },
    .free_event = [](CUevent_st* event) { delete event; },
    .record = record,
    .wait = wait,
    .passed =
        [](CUevent_st* event) {
          const auto point = point_of(event);
          const std::lock_guard lock(mutex);
          return point->passed;
        },
    .synchronize = [](CUevent_st* event) { wait_for(point_of(event)); },
    .milliseconds_between =
        [](CUevent_st* from, CUevent_st* to) {
          return std::chrono::duration<double, std::milli>(point_of(to)->time -
                                                           point_of(from)->time)
              .count();
        },
};

}  // namespace lockstep::comm::fake
