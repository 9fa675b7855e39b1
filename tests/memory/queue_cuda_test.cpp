// SPDX-License-Identifier: Apache-2.0
// Queues, device and host memory with a GPU.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "lockstep/core/trace.h"
#include "lockstep/memory/device_memory.h"
#include "lockstep/memory/host_memory.h"
#include "lockstep/memory/queue.h"
#include "tests/support/subprocess.h"
#include "tests/support/trace_spans.h"

namespace lockstep::memory {
namespace {

const c10::Device kCuda(c10::kCUDA, 0);
constexpr size_t kBytes = size_t{64} << 20;
constexpr int64_t kCount = kBytes / sizeof(int32_t);

at::Tensor tensor_at(void* data) {
  return at::from_blob(data, {kCount}, at::TensorOptions().dtype(at::kInt).device(kCuda));
}

std::shared_ptr<Queue> queue_of(const std::string& name = "to device", bool paced = false) {
  return make_queue(kCuda, {.rank = 3, .name = name, .paced = paced});
}

struct Memory {
  explicit Memory(HostKind kind)
      : host(HostMemory(Budget("host", 0), kind).take(2 * kBytes, "host")),
        device(DeviceMemory(kCuda, Budget("device", 0)).take(kBytes, "device")) {
    std::iota(from(), from() + kCount, 1);
  }
  int32_t* from() const { return reinterpret_cast<int32_t*>(host.get()); }
  int32_t* to() const { return from() + kCount; }

  std::shared_ptr<std::byte> host;
  std::shared_ptr<void> device;
};

// There, changed by the computation, and back: only events keep the three in order.
void expect_order(bool paced) {
  for (const HostKind kind : {HostKind::pinned, HostKind::pageable}) {
    const Memory memory(kind);
    const auto in = queue_of("to device", paced), out = queue_of("to host", paced);
    EXPECT_EQ(in->stream() == out->stream(), paced);  // which has none to show
    at::Tensor tensor = tensor_at(memory.device.get());
    for (int32_t round = 1; round <= 5; ++round) {
      in->wait(computed(kCuda));
      in->copy(memory.device.get(), memory.from(), kBytes, "blocks.0");
      compute_after(in->record(), kCuda);
      tensor.mul_(2).add_(round);
      out->wait(computed(kCuda));
      out->copy(memory.to(), memory.device.get(), kBytes, "blocks.0");
      const Event done = out->record();
      EXPECT_NE(done.cuda_event(), nullptr);
      in->wait(done);
      done.wait();
      EXPECT_TRUE(done.passed());
      for (const int64_t i : {int64_t{0}, kCount / 2, kCount - 1})
        ASSERT_EQ(memory.to()[i], 2 * (i + 1) + round);
    }
  }
}

TEST(CudaQueue, CopiesBesideTheComputationInOrder) { expect_order(false); }
TEST(CudaQueue, CopiesInOrderWherePaced) { expect_order(true); }

TEST(CudaQueue, AThreadWaitsForCopies) {
  const Memory memory(HostKind::pinned);
  const auto in = queue_of(), out = queue_of("to host");
  const auto update = make_host_queue({.rank = 3, .name = "updates"});
  in->copy(memory.device.get(), memory.from(), kBytes, "blocks.0");
  out->wait(in->record());
  out->copy(memory.to(), memory.device.get(), kBytes, "blocks.0");
  update->wait(out->record());
  bool same = false;
  update->run([&] { same = std::memcmp(memory.to(), memory.from(), kBytes) == 0; }, "compare");
  in->wait(update->record());  // the calling thread waits
  EXPECT_TRUE(same);
}

TEST(CudaQueue, IsDestroyedWhenEverythingIsDone) {
  const Memory memory(HostKind::pinned);
  auto queue = queue_of();
  queue->copy(memory.device.get(), memory.from(), kBytes, "in");
  queue->copy(memory.to(), memory.device.get(), kBytes, "out");
  queue.reset();
  EXPECT_EQ(std::memcmp(memory.to(), memory.from(), kBytes), 0);
}

TEST(CudaQueue, RefusesHostWork) {
  const auto queue = queue_of();
  EXPECT_THROW(queue->run([] {}, "x"), std::logic_error);
}

TEST(CudaDeviceMemory, HoldsToItsBudget) {
  const DeviceMemory device(kCuda, Budget("offload.device_budget", 1000));
  EXPECT_EQ(device.rounded(1), 512U);
  {
    const std::shared_ptr<void> memory = device.take(100, "a");
    EXPECT_EQ(reinterpret_cast<uintptr_t>(memory.get()) % 256, 0U);
    EXPECT_EQ(device.budget().used(), 512U);
    EXPECT_THROW(device.take(1, "b"), OverBudget);
  }
  EXPECT_EQ(device.budget().used(), 0U);
}

TEST(CudaQueue, AppearsInTheTrace) {
  const auto start = Clock::now();
  {
    const Memory memory(HostKind::pinned);
    const auto queue = make_queue(kCuda, {.rank = 5, .name = "to device"});
    for (int i = 0; i < 3; ++i) queue->copy(memory.device.get(), memory.from(), kBytes, "traced");
  }
  const auto end = Clock::now();
  trace::flush();
  const auto microseconds = [](Clock::time_point time) {
    return std::chrono::duration<double, std::micro>(time.time_since_epoch()).count();
  };
  const auto events = test::read_trace(std::getenv("LOCKSTEP_TRACE"));
  int seen = 0;
  double before = microseconds(start);
  for (const auto& event : events) {
    if (event["ph"] != "X" || event["pid"] != 5 || event["name"] != "traced") continue;
    ++seen;
    EXPECT_EQ(event["cat"], "transfer");
    EXPECT_EQ(event["args"]["bytes"], kBytes);
    const double begin = event["ts"], took = event["dur"];
    EXPECT_GE(begin, before - 1);  // one after the other, on our clock
    EXPECT_GT(took, 100);          // no bus moves 640 GB a second
    before = begin + took;
  }
  EXPECT_EQ(seen, 3);
  EXPECT_LE(before, microseconds(end) + 100);
}

}  // namespace
}  // namespace lockstep::memory

// The trace's folder is read once, before anything else.
int main(int argc, char** argv) {
  const lockstep::test::TempDir folder;
  setenv("LOCKSTEP_TRACE", folder.path().c_str(), 1);
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
