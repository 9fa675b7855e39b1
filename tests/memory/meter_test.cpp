// SPDX-License-Identifier: Apache-2.0
#include "lockstep/memory/meter.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <thread>
#include <vector>

#include "lockstep/memory/counting/thread_usage.h"

namespace lockstep::memory {
namespace {

using testing::HasSubstr;

constexpr int64_t kBytes = 1 << 20;
constexpr int64_t kRounding = 8192;  // malloc's pages and headers

at::Tensor megabyte() { return at::empty({kBytes}, at::kByte); }

class MeterTest : public testing::Test {
 protected:
  MeterTest() {
    Meter::install();
    Meter::reset_peak();
  }
  ~MeterTest() override { Meter::set_limit(0); }
};

TEST_F(MeterTest, CountsWhatTensorsTake) {
  const int64_t before = Meter::current();
  at::Tensor a = megabyte(), b = megabyte();
  EXPECT_NEAR(Meter::current() - before, 2 * kBytes, 2 * kRounding);
  const at::Tensor view = a.narrow(0, 5, 10);
  a.reset();
  b.reset();
  EXPECT_NEAR(Meter::current() - before, kBytes, kRounding);
  EXPECT_NEAR(Meter::peak() - before, 2 * kBytes, 2 * kRounding);
  Meter::reset_peak();
  EXPECT_EQ(Meter::peak(), Meter::current());
}

TEST_F(MeterTest, EveryByteIsGivenBack) {
  const int64_t before = Meter::current();
  for (int64_t size = 0; size < 5000; size += 7) {
    const at::Tensor tensor = at::empty({size}, at::kByte);
    if (size > 0) {
      EXPECT_GE(Meter::current(), before + size);
      EXPECT_EQ(reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 64, 0u);
    }
    at::Tensor larger = tensor.clone();
    larger.resize_({3 * size + 1});
  }
  EXPECT_EQ(Meter::current(), before);
}

TEST_F(MeterTest, TensorsOfOtherThreadsCount) {
  const int64_t before = Meter::current();
  std::vector<at::Tensor> made(8);
  std::vector<std::jthread> threads;
  for (at::Tensor& tensor : made) {
    threads.emplace_back([&tensor] {
      for (int i = 0; i < 1000; ++i) tensor = at::empty({1 + i}, at::kByte);
      tensor = megabyte();
    });
  }
  threads.clear();
  EXPECT_NEAR(Meter::current() - before, 8 * kBytes, 8 * kRounding);
  made.clear();
  EXPECT_EQ(Meter::current(), before);
}

TEST_F(MeterTest, CountsThreadsApart) {
  const ThreadUsage mine, other;
  mine.enter();
  at::Tensor kept = at::empty({kBytes}, at::kByte);
  std::thread([&] {
    const at::Tensor uncounted = at::empty({8 * kBytes}, at::kByte);
    other.enter();
    { const at::Tensor temporary = at::empty({2 * kBytes}, at::kByte); }
    kept.reset();  // who releases does not matter
  }).join();
  EXPECT_EQ(mine.peak(), kBytes);
  EXPECT_EQ(mine.current(), 0);
  EXPECT_EQ(other.peak(), 2 * kBytes);
  EXPECT_EQ(other.current(), 0);
  const at::Tensor held = at::empty({kBytes}, at::kByte);
  ThreadUsage::leave();
  const at::Tensor later = at::empty({4 * kBytes}, at::kByte);
  mine.reset_peak();
  EXPECT_EQ(mine.peak(), kBytes);
  EXPECT_EQ(mine.current(), kBytes);
}

TEST_F(MeterTest, HoldsToALimit) {
  const int64_t held = Meter::current();
  Meter::set_limit(held + 3 * kBytes / 2);
  const at::Tensor first = megabyte();
  try {
    megabyte();
    FAIL() << "there was no memory for it";
  } catch (const OutOfMemory& error) {
    EXPECT_EQ(error.asked(), kBytes);
    EXPECT_NEAR(error.held() - held, kBytes, kRounding);
    EXPECT_EQ(error.limit(), held + 3 * kBytes / 2);
    EXPECT_THAT(error.what(), HasSubstr("out of memory: 1048576 bytes asked for"));
  }
  EXPECT_NEAR(Meter::current() - held, kBytes, kRounding);
  Meter::set_limit(0);
  EXPECT_NO_THROW(megabyte());
}

// Autograd runs functions on behalf of others and hands on what they throw.
TEST_F(MeterTest, OutOfMemoryComesThroughBackward) {
  const at::Tensor x = at::ones({kBytes / 4}).requires_grad_();
  const at::Tensor y = x.exp().exp().sum();
  Meter::set_limit(Meter::current() + 100);
  EXPECT_THROW(y.backward(), OutOfMemory);
}

}  // namespace
}  // namespace lockstep::memory
