// SPDX-License-Identifier: Apache-2.0
#include "lockstep/memory/device_memory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "tests/support/says.h"

namespace lockstep::memory {
namespace {

using test::says;
using testing::AllOf;
using testing::Each;
using testing::HasSubstr;
using testing::ThrowsMessage;

const auto kDevicePage = static_cast<size_t>(sysconf(_SC_PAGESIZE));

DeviceMemory device_of(size_t pages) {
  return {c10::Device(c10::kCPU), Budget("offload.device_budget", pages * kDevicePage)};
}

volatile char& byte_of(const std::shared_ptr<void>& memory, size_t at) {
  return static_cast<volatile char*>(memory.get())[at];
}

TEST(DeviceMemoryDeathTest, ReleasedMemoryFaults) {
  const DeviceMemory device = device_of(8);
  std::shared_ptr<void> memory = device.take(2 * kDevicePage, "x"), next = device.take(1, "y");
  auto* const bytes = static_cast<volatile char*>(memory.get());
  std::memset(memory.get(), 1, 2 * kDevicePage);
  memory.reset();
  byte_of(next, 0) = 1;  // its neighbour is untouched
  EXPECT_EXIT(bytes[0] = 1, testing::KilledBySignal(SIGSEGV), "");
  EXPECT_EXIT(bytes[2 * kDevicePage - 1] = 1, testing::KilledBySignal(SIGSEGV), "");
  EXPECT_EXIT(static_cast<void>(bytes[0]), testing::KilledBySignal(SIGSEGV), "");
}

TEST(DeviceMemoryDeathTest, WhatWasNeverTakenFaults) {
  const DeviceMemory device = device_of(8);
  const std::shared_ptr<void> memory = device.take(kDevicePage + 1, "x");
  byte_of(memory, 2 * kDevicePage - 1) = 1;
  EXPECT_EXIT({ byte_of(memory, 2 * kDevicePage) = 1; }, testing::KilledBySignal(SIGSEGV), "");
}

TEST(DeviceMemory, CountsWholePages) {
  const DeviceMemory device = device_of(4);
  EXPECT_EQ(device.rounded(0), kDevicePage);
  EXPECT_EQ(device.rounded(1), kDevicePage);
  EXPECT_EQ(device.rounded(kDevicePage), kDevicePage);
  EXPECT_EQ(device.rounded(kDevicePage + 1), 2 * kDevicePage);
  const std::shared_ptr<void> a = device.take(1, "a"), b = device.take(kDevicePage + 1, "b");
  EXPECT_EQ(device.budget().used(), 3 * kDevicePage);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(a.get()) % kDevicePage, 0U);
  EXPECT_EQ(static_cast<char*>(b.get()) - static_cast<char*>(a.get()),
            static_cast<ptrdiff_t>(kDevicePage));
}

TEST(DeviceMemory, HoldsToItsLimit) {
  const DeviceMemory device = device_of(256);
  const std::shared_ptr<void> most = device.take(200 * kDevicePage, "blocks.0");
  EXPECT_THAT([&] { device.take(57 * kDevicePage, "blocks.1"); },
              ThrowsMessage<OverBudget>(AllOf(
                  HasSubstr("[offload.device_budget] "), HasSubstr(" for blocks.1 are too many"),
                  HasSubstr(kDevicePage == 4096 ? "800 kB of 1 MB are taken" : " are taken"))));
  EXPECT_EQ(device.budget().used(), 200 * kDevicePage);
  const std::shared_ptr<void> rest = device.take(56 * kDevicePage, "blocks.1");
  EXPECT_EQ(device.budget().pressure(), 1.0);
}

TEST(DeviceMemory, ResidentIsWhatWasTouched) {
  const DeviceMemory device = device_of(64);
  EXPECT_EQ(device.resident(), 0U);
  std::shared_ptr<void> a = device.take(20 * kDevicePage, "a"),
                        b = device.take(44 * kDevicePage, "b");
  EXPECT_EQ(device.resident(), 0U);
  std::memset(a.get(), 1, 20 * kDevicePage);
  EXPECT_EQ(device.resident(), 20 * kDevicePage);
  for (size_t page = 0; page < 44; page += 4) byte_of(b, page * kDevicePage) = 1;
  EXPECT_EQ(device.resident(), 31 * kDevicePage);
  std::memset(b.get(), 1, 44 * kDevicePage);
  EXPECT_EQ(device.resident(), device.budget().limit());
  a.reset();
  EXPECT_EQ(device.resident(), 44 * kDevicePage);
  b.reset();
  EXPECT_EQ(device.resident(), 0U);
  // What takes the place finds nothing of it.
  const std::shared_ptr<void> again = device.take(64 * kDevicePage, "c");
  const auto* const bytes = static_cast<const char*>(again.get());
  EXPECT_THAT(std::vector<char>(bytes, bytes + 64 * kDevicePage), Each('\0'));
}

// More pages than are counted at once, and no multiple of that.
TEST(DeviceMemory, ResidentCountsAllOfALargeStretch) {
  const DeviceMemory device = device_of((size_t{1} << 17) + 5);
  const std::shared_ptr<void> all = device.take(device.budget().limit(), "all");
  for (const size_t page :
       {size_t{0}, (size_t{1} << 16) - 1, size_t{1} << 16, (size_t{1} << 17) + 4})
    byte_of(all, page * kDevicePage) = 1;
  EXPECT_EQ(device.resident(), 4 * kDevicePage);
}

TEST(DeviceMemory, TakesTheSamePlacesAgain) {
  const DeviceMemory device = device_of(10);
  const void* const first = device.take(3 * kDevicePage, "x").get();
  for (int i = 0; i < 100; ++i) {
    const std::shared_ptr<void> a = device.take(3 * kDevicePage, "a"),
                                b = device.take(7 * kDevicePage, "b");
    EXPECT_EQ(a.get(), first);
  }
  EXPECT_EQ(device.budget().used(), 0U);
  EXPECT_EQ(device.budget().peak(), 10 * kDevicePage);
}

TEST(DeviceMemory, SaysWhereGapsAreTooSmall) {
  const DeviceMemory device = device_of(256);
  std::vector<std::shared_ptr<void>> parts;
  for (int i = 0; i < 8; ++i) parts.push_back(device.take(32 * kDevicePage, "part"));
  parts[1].reset();
  parts[2].reset();
  parts[5].reset();
  EXPECT_THAT([&] { device.take(65 * kDevicePage, "blocks.7"); },
              ThrowsMessage<OverBudget>(AllOf(
                  HasSubstr("[offload.device_budget] "), HasSubstr(" for blocks.7 do not fit: "),
                  says(kDevicePage == 4096 ? "640 kB of 1 MB ... gap is 256 kB" : "largest gap"))));
  EXPECT_EQ(device.budget().used(), 5 * 32 * kDevicePage);
  EXPECT_TRUE(device.budget().fits(65 * kDevicePage));
  EXPECT_FALSE(device.fits(64 * kDevicePage + 1));
  EXPECT_TRUE(device.fits(64 * kDevicePage));
  // The first gap that is large enough.
  const std::shared_ptr<void> fits = device.take(64 * kDevicePage, "blocks.7");
  EXPECT_LT(fits.get(), parts[3].get());
  const std::shared_ptr<void> small = device.take(32 * kDevicePage, "blocks.8");
  EXPECT_LT(parts[4].get(), small.get());
  EXPECT_LT(small.get(), parts[6].get());
}

TEST(DeviceMemory, MayBeUnlimited) {
  const DeviceMemory device(c10::Device(c10::kCPU), Budget("offload.device_budget", 0));
  const std::shared_ptr<void> memory = device.take(size_t{64} << 20, "x");
  byte_of(memory, (size_t{64} << 20) - 1) = 1;
  EXPECT_EQ(device.resident(), kDevicePage);
}

TEST(DeviceMemory, WhatWasTakenMayOutliveIt) {
  std::shared_ptr<void> memory;
  {
    const DeviceMemory device = device_of(4);
    memory = device.take(4 * kDevicePage, "x");
  }
  std::memset(memory.get(), 1, 4 * kDevicePage);
}

TEST(DeviceMemory, ManyThreads) {
  const DeviceMemory device = device_of(6);
  std::vector<std::jthread> threads;
  std::vector<int> wrong(6);
  for (size_t t = 0; t < wrong.size(); ++t) {
    threads.emplace_back([&device, &wrong = wrong[t], t] {
      const char mark = static_cast<char>(t + 1);
      for (int i = 0; i < 300; ++i) {
        const std::shared_ptr<void> a = device.take(1, "a");
        std::memset(a.get(), mark, kDevicePage);
        std::this_thread::yield();
        if (byte_of(a, 0) != mark || byte_of(a, kDevicePage - 1) != mark) ++wrong;
      }
    });
  }
  threads.clear();
  EXPECT_THAT(wrong, Each(0));
  EXPECT_EQ(device.budget().used(), 0U);
  EXPECT_EQ(device.resident(), 0U);
}

}  // namespace
}  // namespace lockstep::memory
