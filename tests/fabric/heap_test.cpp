// SPDX-License-Identifier: Apache-2.0
// Symmetric memory: blocks that share segments.
#include "lockstep/fabric/heap.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <random>
#include <stdexcept>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/core/system_memory.h"
#include "tests/fabric/world.h"

namespace lockstep::fabric::testing {
namespace {

using Block = std::shared_ptr<std::byte>;

size_t open_files() {
  const std::filesystem::directory_iterator files("/proc/self/fd");
  return static_cast<size_t>(std::distance(begin(files), end(files)));
}

bool holds(const std::byte* data, size_t bytes, int value) {
  return std::all_of(data, data + bytes,
                     [&](std::byte each) { return each == static_cast<std::byte>(value); });
}

TEST(Heap, PeersFollowFreedAndReusedBlocks) {
  SharedHeap heap;
  PeerHeaps peers;
  for (int round = 0; round < 3; ++round) {
    const auto block = heap.allocate(100);
    std::memset(block.get(), round, 100);
    const Location place = heap.find(block.get() + 10, 20);
    ASSERT_EQ(place.kind, Location::block);
    EXPECT_EQ(peers.resolve(heap.table(), place)[0], static_cast<std::byte>(round));
    EXPECT_EQ(heap.find(block.get() + 10, 1'000'000).kind, Location::unreachable);
  }
  int ordinary = 0;
  EXPECT_EQ(heap.find(&ordinary, sizeof ordinary).kind, Location::unreachable);
}

TEST(Heap, ManyBlocksTakeFewDescriptors) {
  const size_t files = open_files(), memory = symmetric_memory();
  SharedHeap heap;
  PeerHeaps peers;
  std::vector<Block> blocks;
  size_t total = 0;
  for (size_t i = 0; i < 5000; ++i) {
    const size_t bytes = i % 100 == 0 ? 300'000 : 1 + i % 3000;
    blocks.push_back(heap.allocate(bytes));
    std::memcpy(blocks[i].get(), &i, std::min(bytes, sizeof i));
    total += bytes;
  }
  EXPECT_LE(open_files(), files + 10);
  EXPECT_LE(symmetric_memory() - memory, total + total / 10);  // what is asked for, no more
  for (size_t i = 0; i < blocks.size(); ++i) {
    EXPECT_EQ(reinterpret_cast<uintptr_t>(blocks[i].get()) % 256, 0u);
    const Location place = heap.find(blocks[i].get(), 1);
    EXPECT_EQ(peers.resolve(heap.table(), place)[0], static_cast<std::byte>(i));
  }
  EXPECT_LE(open_files(), files + 10);
  blocks.clear();
  EXPECT_EQ(symmetric_memory(), memory);
}

// In any order of allocating and freeing: no two blocks overlap, all are zero when they are new,
// and what is free is the system's.
TEST(Heap, BlocksKeepApart) {
  constexpr size_t kPage = 65'536;  // at most
  const size_t memory = symmetric_memory();
  SharedHeap heap;
  PeerHeaps peers;
  struct Live {
    Block data;
    size_t bytes;
    int value;
  };
  std::vector<Live> live;
  std::mt19937 random(1);
  for (int round = 0; round < 2000; ++round) {
    if (live.empty() || random() % 5 < 3) {
      const size_t bytes = 1 + random() % (random() % 4 == 0 ? 200'000 : 5000);
      const Block block = heap.allocate(bytes);
      ASSERT_TRUE(holds(block.get(), bytes, 0)) << round;
      std::memset(block.get(), round % 251 + 1, bytes);
      live.push_back({block, bytes, round % 251 + 1});
    } else {
      const size_t index = random() % live.size();
      const auto& [data, bytes, value] = live[index];
      ASSERT_TRUE(holds(data.get(), bytes, value)) << round;
      const std::byte* theirs = peers.resolve(heap.table(), heap.find(data.get(), bytes));
      ASSERT_TRUE(holds(theirs, bytes, value)) << round;
      std::swap(live[index], live.back());
      live.pop_back();
    }
    if (live.size() > 300) live.erase(live.begin(), live.begin() + 250);
  }
  size_t total = 0;
  for (const Live& each : live) total += each.bytes + 2 * kPage;
  EXPECT_LE(symmetric_memory() - memory, total);
  live.clear();
  EXPECT_EQ(symmetric_memory(), memory);
}

TEST(Heap, ABlockLargerThanASegment) {
  SharedHeap heap;
  PeerHeaps peers;
  const Block small = heap.allocate(8), large = heap.allocate(100 << 20), other = heap.allocate(8);
  large.get()[(100 << 20) - 1] = std::byte{5};
  const Location place = heap.find(large.get(), 100 << 20);
  EXPECT_EQ(peers.resolve(heap.table(), place)[(100 << 20) - 1], std::byte{5});
}

TEST(Heap, AFreedBlockIsNotFoundByPeers) {
  SharedHeap heap;
  PeerHeaps peers;
  Block block = heap.allocate(1000);
  const Location place = heap.find(block.get(), 1000);
  peers.resolve(heap.table(), place);
  block.reset();
  EXPECT_THROW(peers.resolve(heap.table(), place), std::logic_error);
  block = heap.allocate(1000);
  EXPECT_THROW(peers.resolve(heap.table(), place), std::logic_error);
}

TEST(Heap, LentBlocksKeepTheirMemory) {
  const size_t memory = symmetric_memory();
  SharedHeap heap;
  PeerHeaps peers;
  Block block = heap.allocate(10'000);
  std::memset(block.get(), 7, 10'000);
  const Location place = heap.find(block.get(), 10'000);
  heap.lend(block.get() + 5000, 2);
  const std::byte* theirs = peers.resolve(heap.table(), place);
  block.reset();
  for (int gone = 0; gone < 2; ++gone) {
    const Block other = heap.allocate(10'000);
    std::memset(other.get(), 9, 10'000);
    EXPECT_TRUE(holds(theirs, 10'000, 7));
    EXPECT_EQ(peers.resolve(heap.table(), place), theirs);
    peers.give_back(heap.table(), place);
  }
  heap.find(&heap, 1);  // any call
  EXPECT_EQ(symmetric_memory(), memory);
  EXPECT_THROW(peers.resolve(heap.table(), place), std::logic_error);
}

// A rank that is late may still write to the output of one that has given up: what that rank
// allocates next must lie elsewhere, also when the group has gone.
TEST(Heap, MemoryOfAFailedOperationIsNotReused) {
  const auto heap = std::make_shared<SharedHeap>();
  Block block = heap->allocate(1 << 20);
  const std::byte* const address = block.get();
  {
    Engine engine(Seat(Board::create(2, true), 0, "test", heap, std::make_shared<PeerHeaps>()), {});
    const std::span data(block.get(), 1 << 20);
    const auto ticket = engine.submit({.kind = OpKind::all_reduce,
                                       .dtype = DType::float32,
                                       .input = data,
                                       .output = data,
                                       .timeout = milliseconds{100},
                                       .count = 1 << 18},
                                      block);
    EXPECT_THROW(engine.wait(*ticket), TimeoutError);  // rank 1 has not come
  }
  block.reset();
  block = heap->allocate(1 << 20);
  EXPECT_NE(block.get(), address);
}

TEST(Segment, NoRoomIsAnError) {
  EXPECT_THROW(Segment::create(size_t{1} << 50, "too-large"), SystemError);
}

}  // namespace
}  // namespace lockstep::fabric::testing
