// SPDX-License-Identifier: Apache-2.0
#include "lockstep/memory/host_memory.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "lockstep/core/fd.h"
#include "lockstep/core/size_text.h"
#include "tests/support/child_process.h"
#include "tests/support/says.h"

namespace lockstep::memory {
namespace {

using test::in_a_fresh_process;
using testing::HasSubstr;
using testing::ThrowsMessage;

const auto kPage = static_cast<size_t>(sysconf(_SC_PAGESIZE));
constexpr size_t kMebibyte = size_t{1} << 20;

// A line of /proc/self/status, in bytes. Without the heap, which must not change meanwhile.
size_t status_of(const char* key) {
  const Fd file(open("/proc/self/status", O_RDONLY | O_CLOEXEC));
  char text[8192] = {};
  if (read(file.get(), text, sizeof(text) - 1) <= 0) return 0;
  const char* const line = std::strstr(text, key);
  return line == nullptr ? 0 : std::strtoull(line + std::strlen(key), nullptr, 10) * 1024;
}

bool all_zero(const std::byte* bytes, size_t size) {
  return std::all_of(bytes, bytes + size, [](std::byte byte) { return byte == std::byte{0}; });
}

size_t pages_present(std::byte* start, size_t bytes) {
  std::vector<unsigned char> present((bytes + kPage - 1) / kPage);
  if (mincore(start, bytes, present.data()) != 0) return 0;
  return static_cast<size_t>(std::count_if(present.begin(), present.end(),
                                           [](unsigned char bits) { return (bits & 1) != 0; }));
}

TEST(HostMemory, HasExactlyTheSizeAskedFor) {
  const HostMemory host(Budget("offload.host_budget", 64 * kMebibyte), HostKind::pageable);
  const size_t size = 33 * kMebibyte + 1, pages = 33 * kMebibyte + kPage;
  host.take(1, "the first time");
  const size_t mapped = status_of("VmSize:");
  const std::shared_ptr<std::byte> memory = host.take(size, "x");
  EXPECT_EQ(status_of("VmSize:") - mapped, pages);
  EXPECT_EQ(host.budget().used(), pages);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(memory.get()) % kPage, 0U);
  EXPECT_EQ(pages_present(memory.get(), pages), pages / kPage);
  EXPECT_TRUE(all_zero(memory.get(), pages));
}

TEST(HostMemory, LargeOnesAreBroughtInByThreads) {
  const HostMemory host(Budget("offload.host_budget", 0), HostKind::pageable);
  for (const size_t size : {64 * kMebibyte, 64 * kMebibyte + 1, 65 * kMebibyte + 5 * kPage}) {
    const std::shared_ptr<std::byte> memory = host.take(size, "x");
    EXPECT_EQ(pages_present(memory.get(), size), (size + kPage - 1) / kPage);
    memory.get()[size - 1] = std::byte{1};
  }
}

TEST(HostMemory, IsGivenBack) {
  const HostMemory host(Budget("offload.host_budget", 48 * kMebibyte), HostKind::pageable);
  host.take(1, "the first time");
  const size_t mapped = status_of("VmSize:");
  for (int i = 0; i < 3; ++i) std::memset(host.take(48 * kMebibyte, "x").get(), 1, 48 * kMebibyte);
  EXPECT_EQ(status_of("VmSize:"), mapped);
  EXPECT_EQ(host.budget().used(), 0U);
  EXPECT_EQ(host.budget().peak(), 48 * kMebibyte);
}

TEST(HostMemory, HoldsToItsBudget) {
  const HostMemory host(Budget("offload.host_budget", 3 * kMebibyte), HostKind::pageable);
  const std::shared_ptr<std::byte> memory = host.take(2 * kMebibyte, "blocks.0");
  EXPECT_THAT([&] { host.take(kMebibyte + 1, "blocks.1"); },
              ThrowsMessage<OverBudget>(
                  HasSubstr("[offload.host_budget] 1 MB for blocks.1 are too many: 2 MB of 3 MB")));
  EXPECT_NO_THROW(host.take(kMebibyte, "blocks.1"));
}

TEST(HostMemory, WhatTheSystemDoesNotHaveIsAnError) {
  const HostMemory host(Budget("offload.host_budget", 0), HostKind::pageable);
  EXPECT_THAT([&] { host.take(size_t{1} << 50, "blocks.0"); },
              ThrowsMessage<SystemError>(HasSubstr("1 PB for blocks.0")));
  EXPECT_EQ(host.budget().used(), 0U);
}

TEST(HostMemory, MayOutliveIt) {
  std::shared_ptr<std::byte> memory;
  {
    const HostMemory host(Budget("offload.host_budget", 0), HostKind::pinned);
    EXPECT_EQ(host.kind(), HostKind::pinned);
    memory = host.take(kPage + 1, "x");
  }
  EXPECT_TRUE(all_zero(memory.get(), 2 * kPage));
  std::memset(memory.get(), 1, 2 * kPage);
}

// In processes of their own, which have no GPU: they see what is locked, and who may lock how much.
TEST(HostMemory, PinnedIsLocked) {
  EXPECT_EQ(in_a_fresh_process([]() -> std::string {
              const HostMemory host(Budget("offload.host_budget", 0), HostKind::pinned);
              const size_t before = status_of("VmLck:"), size = 3 * kMebibyte + kPage + 1;
              std::shared_ptr<std::byte> memory = host.take(size, "x");
              if (status_of("VmLck:") - before != 3 * kMebibyte + 2 * kPage)
                return "locked: " + std::to_string(status_of("VmLck:"));
              if (pages_present(memory.get(), size) * kPage != 3 * kMebibyte + 2 * kPage)
                return "not all is there";
              memory.reset();
              if (status_of("VmLck:") != before) return "still locked";
              return "";
            }),
            "");
}

TEST(HostMemory, APinThatIsRefusedSaysWhyAndLeavesNothing) {
  EXPECT_EQ(in_a_fresh_process([]() -> std::string {
              const rlimit limit{kMebibyte, kMebibyte};
              if (setrlimit(RLIMIT_MEMLOCK, &limit) != 0) return "setrlimit";
              // Root may lock what it wants.
              if (geteuid() == 0 && setuid(65534) != 0) return "setuid";
              // Libraries may have locked a little when they were loaded.
              const size_t locked = status_of("VmLck:") + 512 * 1024;
              const HostMemory host(Budget("offload.host_budget", 0), HostKind::pinned);
              const std::shared_ptr<std::byte> first = host.take(512 * 1024, "blocks.0");
              std::string text;
              const size_t mapped = status_of("VmSize:"), used = host.budget().used();
              try {
                host.take(700 * 1024, "optimizer state of blocks.1");
                return "was not refused";
              } catch (const SystemError& error) {
                text = error.what();
              }
              const std::string expected =
                  "[host memory] ... 700 kB ... optimizer state of blocks.1 ... " +
                  size_text(locked) +
                  " are pinned already ... limit is 1 MB ... ulimit -l ... offload.pin";
              if (!test::missing_fact(text, expected).empty()) return text;
              if (host.budget().used() != used) return "the budget still counts it";
              if (status_of("VmSize:") > mapped + 700 * 1024 - kPage) return "it is still mapped";
              if (status_of("VmLck:") != locked) return "something is still locked";
              host.take(256 * 1024, "what fits");
              return "";
            }),
            "");
}

}  // namespace
}  // namespace lockstep::memory
