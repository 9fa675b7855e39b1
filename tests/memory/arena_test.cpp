// SPDX-License-Identifier: Apache-2.0
#include "lockstep/memory/arena.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/system_memory.h"

namespace lockstep::memory {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

TEST(Arena, TakesTheFirstGapThatIsLargeEnough) {
  Arena arena(1024);
  auto a = arena.take(128);
  const auto b = arena.take(64);
  auto c = arena.take(256);
  const auto d = arena.take(64);
  std::byte* const start = a.get();
  EXPECT_EQ(b.get(), start + 128);
  EXPECT_EQ(c.get(), start + 192);
  a.reset();
  c.reset();
  const auto large = arena.take(256);
  EXPECT_EQ(large.get(), start + 192) << "the first gap is too small";
  const auto small = arena.take(64), next = arena.take(64);
  EXPECT_EQ(small.get(), start);
  EXPECT_EQ(next.get(), start + 64);
  EXPECT_EQ(arena.take(1).get(), d.get() + 64) << "no gap is left";
}

// Bytes that have memory behind them.
size_t resident(std::span<std::byte> bytes) {
  std::vector<unsigned char> pages(bytes.size() / page_size());
  EXPECT_EQ(mincore(bytes.data(), bytes.size(), pages.data()), 0);
  size_t sum = 0;
  for (const unsigned char page : pages) sum += (page & 1) * page_size();
  return sum;
}

TEST(Pages, AreGivenBackWhole) {
  const size_t page = page_size(), size = 8 * page;
  const Fd file(memfd_create("pages", MFD_CLOEXEC));
  ASSERT_EQ(ftruncate(file.get(), static_cast<off_t>(size)), 0);
  for (const bool shared : {false, true}) {
    void* const start =
        mmap(nullptr, size, PROT_READ | PROT_WRITE,
             shared ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS, shared ? file.get() : -1, 0);
    ASSERT_NE(start, MAP_FAILED);
    const std::span bytes(static_cast<std::byte*>(start), size);
    std::memset(start, 7, size);
    EXPECT_EQ(resident(bytes), size);
    give_back_pages(bytes.subspan(page + 1, 4 * page));  // three of them are in it wholly
    EXPECT_EQ(resident(bytes), 5 * page) << shared;
    EXPECT_EQ(bytes[2 * page - 1], std::byte{7});
    EXPECT_EQ(bytes[2 * page], std::byte{0});
    EXPECT_EQ(bytes[5 * page], std::byte{7});
    give_back_pages(bytes.first(page - 1));
    EXPECT_EQ(bytes[0], std::byte{7});
    struct stat status {};
    ASSERT_EQ(fstat(file.get(), &status), 0);
    if (shared) {  // not only unmapped here: reading has brought one of them back
      EXPECT_LE(status.st_blocks * 512, static_cast<int64_t>(6 * page));
    }
    munmap(start, size);
  }
}

TEST(Arena, SizesAreRoundedAndAligned) {
  Arena arena(1000);  // 1024 in fact
  const auto a = arena.take(1), b = arena.take(65), c = arena.take(0);
  for (const auto& each : {a, b, c}) EXPECT_EQ(reinterpret_cast<uintptr_t>(each.get()) % 64, 0u);
  EXPECT_EQ(b.get() - a.get(), 64);
  EXPECT_EQ(c.get() - b.get(), 128);
  EXPECT_EQ(arena.stats().used, 256u);
}

TEST(Arena, TheSameSequenceNeedsNoMoreMemory) {
  Arena arena(1 << 20);
  size_t growths = 0, resident = 0;
  for (int step = 0; step < 10; ++step) {
    auto a = arena.take(1000);
    auto b = arena.take(5000);
    a.reset();
    const auto c = arena.take(3000), d = arena.take(900);
    b.reset();
    const auto e = arena.take(4000);
    if (step == 0) {
      growths = arena.stats().growths;
      resident = arena.stats().resident;
    }
  }
  EXPECT_EQ(arena.stats().growths, growths);
  EXPECT_EQ(arena.stats().resident, resident);
  EXPECT_EQ(arena.stats().used, 0u);
  EXPECT_GE(arena.stats().resident, arena.stats().peak);
  EXPECT_GE(arena.stats().peak, 5000u);
}

TEST(Arena, CountsWhatIsUsed) {
  Arena arena(4096);
  EXPECT_EQ(arena.stats().growths, 0u);
  auto a = arena.take(1024), b = arena.take(1024);
  EXPECT_EQ(arena.stats().used, 2048u);
  EXPECT_EQ(arena.stats().growths, 2u);
  a.reset();
  EXPECT_EQ(arena.stats().used, 1024u);
  a = arena.take(512);
  EXPECT_EQ(arena.stats().used, 1536u);
  EXPECT_EQ(arena.stats().peak, 2048u);
  EXPECT_EQ(arena.stats().resident, 2048u);
  EXPECT_EQ(arena.stats().growths, 2u);
}

TEST(Arena, NoRoom) {
  Arena arena(256);
  const auto a = arena.take(64);
  auto b = arena.take(64);
  const auto c = arena.take(64);
  EXPECT_THAT([&] { arena.take(128); },
              ThrowsMessage<Error>(HasSubstr("no room for 128 bytes: 192 of 256 are in use")));
  b.reset();
  EXPECT_THROW(arena.take(128), Error) << "there is as much, but not in one piece";
  EXPECT_EQ(arena.stats().used, 128u);
  EXPECT_NE(arena.take(64), nullptr);
}

TEST(Arena, BuffersOutliveIt) {
  std::shared_ptr<std::byte> buffer, other;
  {
    Arena arena(1 << 16);
    buffer = arena.take(1 << 15);
    other = arena.take(64);
    std::memset(buffer.get(), 1, 1 << 15);
  }
  std::memset(other.get(), 2, 64);
  EXPECT_EQ(buffer.get()[(1 << 15) - 1], std::byte{1});
  buffer.reset();
  EXPECT_EQ(*other, std::byte{2});
}

TEST(Arena, ManyThreads) {
  constexpr int kThreads = 4;
  Arena arena(kThreads * 3 * 4096);
  std::atomic<int> wrong{0};
  {
    std::vector<std::jthread> threads;
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, t] {
        std::mt19937 random(static_cast<unsigned>(t));
        std::array<std::shared_ptr<std::byte>, 3> held;
        std::array<size_t, 3> sizes{};
        for (int i = 0; i < 2000; ++i) {
          const size_t which = random() % held.size();
          if (held[which]) {
            const auto mark = static_cast<std::byte>(t * 3 + static_cast<int>(which));
            for (size_t k = 0; k < sizes[which]; ++k) wrong += held[which].get()[k] != mark;
          }
          held[which].reset();
          sizes[which] = 1 + random() % 1024;
          held[which] = arena.take(sizes[which]);
          std::memset(held[which].get(), t * 3 + static_cast<int>(which), sizes[which]);
        }
      });
    }
  }
  EXPECT_EQ(wrong, 0) << "two threads had the same memory";
  EXPECT_EQ(arena.stats().used, 0u);
}

// Whether the byte can be read, as the kernel sees it.
bool readable(const std::byte* address) {
  std::array<int, 2> ends{};
  if (pipe(ends.data()) != 0) throw SystemError("pipe", errno);
  const Fd reader(ends[0]), writer(ends[1]);
  return write(writer.get(), address, 1) == 1;
}

TEST(AddressRange, WithAndWithoutAccess) {
  const AddressRange none(10000, AddressRange::Access::none);
  EXPECT_FALSE(readable(none.data()));
  EXPECT_FALSE(readable(none.data() + 9999));
  AddressRange some(10000, AddressRange::Access::read_write);
  EXPECT_TRUE(readable(some.data()));
  some.data()[9999] = std::byte{1};
  EXPECT_EQ(some.size(), 10000u);

  AddressRange moved = std::move(some);
  EXPECT_EQ(moved.data()[9999], std::byte{1});
  EXPECT_EQ(some.data(), nullptr);  // NOLINT(bugprone-use-after-move)
  const std::byte* const place = moved.data();
  moved = AddressRange();
  EXPECT_FALSE(readable(place)) << "returned";
  EXPECT_NE(AddressRange(0, AddressRange::Access::none).data(), nullptr);
}

}  // namespace
}  // namespace lockstep::memory
