// SPDX-License-Identifier: Apache-2.0
#include "lockstep/memory/disk_store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/statvfs.h>

#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <filesystem>
#include <future>
#include <mutex>
#include <thread>
#include <vector>

#include "lockstep/core/error.h"
#include "tests/support/child_process.h"
#include "tests/support/subprocess.h"

namespace lockstep::memory {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using Block = DiskStore::Block;
using Data = std::vector<std::byte>;

std::shared_ptr<Data> data_of(size_t size, int seed) {
  auto data = std::make_shared<Data>(size);
  uint32_t state = 2654435761U * static_cast<uint32_t>(seed + 1);
  for (std::byte& byte : *data) {
    state = state * 1664525U + 1013904223U;
    byte = static_cast<std::byte>(state >> 24);
  }
  return data;
}

Block put(DiskStore& store, const std::shared_ptr<Data>& data) { return store.put(*data, data); }

void expect_holds(DiskStore& store, const Block& block, const Data& data) {
  const auto bytes = store.get(block);
  ASSERT_EQ(block.size(), data.size());
  EXPECT_EQ(std::memcmp(bytes.get(), data.data(), data.size()), 0);
}

// Writes are made in order: when a block of which only the store has the bytes is let go, so are
// those before it.
void wait_until_written(DiskStore& store) {
  const auto gone = std::make_shared<std::promise<void>>();
  auto* const last = new Data(1);
  const Block block = store.put(*last, std::shared_ptr<Data>(last, [gone](Data* data) {
    delete data;
    gone->set_value();
  }));
  gone->get_future().wait();
}

class DiskStoreTest : public testing::Test {
 protected:
  const test::TempDir folder_;
};

TEST_F(DiskStoreTest, GivesBackWhatWasPut) {
  DiskStore store(folder_.path());
  std::vector<std::shared_ptr<Data>> all;
  std::vector<Block> blocks;
  for (const size_t size : {1UL, 4095UL, 4096UL, 4097UL, 0UL, 3'000'000UL, 17UL}) {
    all.push_back(data_of(size, static_cast<int>(all.size())));
    blocks.push_back(put(store, all.back()));
  }
  wait_until_written(store);
  for (size_t i = blocks.size(); i-- > 0;) {
    if (i % 2 == 0) store.prefetch(blocks[i]);
    expect_holds(store, blocks[i], *all[i]);
    expect_holds(store, blocks[i], *all[i]);  // it stays until it is dropped
  }
  const DiskStoreStats stats = store.stats();
  EXPECT_EQ(stats.bytes_written, 3'000'000U + 1 + 4095 + 4096 + 4097 + 17 + 1);
  EXPECT_EQ(stats.bytes_read, 2 * (stats.bytes_written - 1));
  EXPECT_EQ(stats.ahead, 4U);
  EXPECT_EQ(stats.late, 10U);
  EXPECT_EQ(stats.from_memory, 0U);
}

TEST_F(DiskStoreTest, LeavesNothingInTheFolder) {
  DiskStore store(folder_.path());
  const Block block = put(store, data_of(100'000, 1));
  wait_until_written(store);
  EXPECT_TRUE(std::filesystem::is_empty(folder_.path()));
}

TEST_F(DiskStoreTest, LetsGoOfWhatIsWritten) {
  DiskStore store(folder_.path());
  auto data = data_of(10'000, 1);
  const std::weak_ptr<Data> kept = data;
  const Block block = put(store, data);
  data.reset();
  wait_until_written(store);
  EXPECT_TRUE(kept.expired());
  expect_holds(store, block, *data_of(10'000, 1));
}

TEST_F(DiskStoreTest, TheFileDoesNotGrow) {
  DiskStore store(folder_.path());
  for (int step = 0; step < 20; ++step) {
    std::vector<Block> blocks;
    for (int i = 0; i < 8; ++i) {
      blocks.push_back(put(store, data_of(static_cast<size_t>(10'000 + 100 * i), 100 * step + i)));
    }
    wait_until_written(store);
    while (!blocks.empty()) {
      const auto last = static_cast<int>(blocks.size()) - 1;
      expect_holds(store, blocks.back(),
                   *data_of(static_cast<size_t>(10'000 + 100 * last), 100 * step + last));
      blocks.pop_back();
    }
  }
  // Eight blocks of three pages, and that of wait_until_written.
  EXPECT_EQ(store.stats().file_size, 8U * 3 * 4096 + 4096);
}

TEST_F(DiskStoreTest, SpaceIsUsedAgainInAnyOrder) {
  DiskStore store(folder_.path());
  constexpr size_t kBlocks = 16;
  std::vector<Block> blocks(kBlocks);
  std::vector<std::shared_ptr<Data>> all(kBlocks);
  uint32_t state = 1;
  const auto random = [&](uint32_t below) {
    state = state * 1664525U + 1013904223U;
    return (state >> 8) % below;
  };
  for (int i = 0; i < 400; ++i) {
    const size_t place = random(kBlocks);
    if (all[place]) {
      if (random(2) == 0) store.prefetch(blocks[place]);
      if (random(4) != 0) expect_holds(store, blocks[place], *all[place]);
    }
    all[place] = data_of(1 + random(40'000), i);
    blocks[place] = put(store, all[place]);
  }
  for (size_t i = 0; i < kBlocks; ++i) {
    if (all[i]) expect_holds(store, blocks[i], *all[i]);
  }
  EXPECT_LE(store.stats().file_size, 2U * kBlocks * 45'056);
}

// The thread is held up while it lets go of a block, so that what is put then must wait.
class Gate {
 public:
  std::shared_ptr<Data> block() {
    return {new Data(1), [this](Data* data) {
              delete data;
              std::unique_lock lock(mutex_);
              reached_ = true;
              changed_.notify_all();
              changed_.wait(lock, [this] { return open_; });
            }};
  }
  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return reached_; });
  }
  void open() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool reached_ = false, open_ = false;
};

TEST_F(DiskStoreTest, WhatIsNotWrittenYetIsTakenFromMemory) {
  Gate gate;
  DiskStore store(folder_.path());
  const Block first = put(store, gate.block());
  gate.wait();
  const auto one = data_of(1000, 1), two = data_of(1000, 2);
  {
    const Block a = put(store, one);
    Block b = put(store, two);
    store.prefetch(b);
    EXPECT_EQ(store.get(a).get(), one->data());
    EXPECT_EQ(store.get(b).get(), two->data());
    EXPECT_EQ(store.stats().peak_memory, 2000U);
  }
  gate.open();
  wait_until_written(store);
  // Those that are dropped are not written.
  const DiskStoreStats stats = store.stats();
  EXPECT_EQ(stats.bytes_written, 2U);
  EXPECT_EQ(stats.from_memory, 1U);
  EXPECT_EQ(stats.ahead, 1U);
  EXPECT_EQ(one.use_count(), 1);
}

TEST_F(DiskStoreTest, PutWaitsWhereTooMuchWaits) {
  Gate gate;
  DiskStore store(folder_.path(), {.max_waiting = 2});
  const Block first = put(store, gate.block());
  gate.wait();
  const Block a = put(store, data_of(1000, 1)), b = put(store, data_of(1000, 2));
  std::atomic<bool> opened = false;
  std::thread opener([&] {
    opened = true;
    gate.open();
  });
  const auto data = data_of(1000, 3);
  const Block c = put(store, data);
  EXPECT_TRUE(opened);  // not before somebody opened
  opener.join();
  wait_until_written(store);
  EXPECT_LE(store.stats().peak_memory, 2000U);
  expect_holds(store, c, *data);
}

TEST_F(DiskStoreTest, ADroppedBlockMakesRoom) {
  Gate gate;
  DiskStore store(folder_.path(), {.max_waiting = 2});
  const Block first = put(store, gate.block());
  gate.wait();
  for (int i = 0; i < 5; ++i) {
    const Block a = put(store, data_of(1000, 1)), b = put(store, data_of(1000, 2));
  }
  gate.open();
}

// While it is being written: its space is free when that is over.
TEST_F(DiskStoreTest, ABlockMayBeDroppedAtAnyTime) {
  DiskStore store(folder_.path());
  constexpr size_t kSize = size_t{32} << 20;
  {
    const Block block = put(store, std::make_shared<Data>(kSize));
    while (store.stats().file_size < kSize) std::this_thread::yield();
  }
  const Block other = put(store, std::make_shared<Data>(kSize));
  wait_until_written(store);
  EXPECT_LE(store.stats().file_size, kSize + 4096);
}

TEST_F(DiskStoreTest, WhatIsReadAheadIsBounded) {
  DiskStore store(folder_.path(), {.max_waiting = 8, .max_ahead = 2});
  std::vector<Block> blocks;
  for (int i = 0; i < 6; ++i) blocks.push_back(put(store, data_of(100'000, i)));
  wait_until_written(store);
  for (const Block& block : blocks) store.prefetch(block);
  for (int i = 5; i >= 0; --i)
    expect_holds(store, blocks[static_cast<size_t>(i)], *data_of(100'000, i));
  const DiskStoreStats stats = store.stats();
  EXPECT_GE(stats.ahead, 2U);
  EXPECT_LE(stats.ahead, 3U);  // one may have been under way
  EXPECT_EQ(stats.ahead + stats.late, 6U);
}

TEST_F(DiskStoreTest, ManyThreads) {
  DiskStore store(folder_.path(), {.max_waiting = 3, .max_ahead = 4});
  std::vector<std::thread> threads;
  std::atomic<int> wrong = 0;
  for (int t = 0; t < 6; ++t) {
    threads.emplace_back([&, t] {
      for (int round = 0; round < 20; ++round) {
        std::vector<Block> blocks;
        for (int i = 0; i < 4; ++i) {
          blocks.push_back(put(store, data_of(static_cast<size_t>(5000 + 1000 * i), 97 * t + i)));
        }
        for (size_t i = blocks.size(); i-- > 0;) {
          if (i > 0) store.prefetch(blocks[i - 1]);
          const auto expected = data_of(5000 + 1000 * i, 97 * t + static_cast<int>(i));
          const auto found = store.get(blocks[i]);
          if (std::memcmp(found.get(), expected->data(), expected->size()) != 0) ++wrong;
          blocks.pop_back();
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

TEST_F(DiskStoreTest, OneBlockForSeveralThreads) {
  DiskStore store(folder_.path());
  const auto data = data_of(50'000, 1);
  const Block block = put(store, data);
  wait_until_written(store);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 50; ++i) expect_holds(store, block, *data);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_F(DiskStoreTest, BlocksMayOutliveTheStore) {
  Gate gate;
  Block first, second;
  const auto data = data_of(1000, 1);
  {
    DiskStore store(folder_.path());
    first = put(store, gate.block());
    gate.wait();
    second = put(store, data);
    gate.open();
  }
  EXPECT_EQ(second.size(), 1000U);
  second = Block();
  EXPECT_EQ(data.use_count(), 1);
}

void expect_config_error(const std::string& folder, const std::string& reason) {
  try {
    const DiskStore store(folder);
    FAIL() << "no error";
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr(folder), HasSubstr(reason)));
  }
}

TEST_F(DiskStoreTest, AFolderThatIsNoneIsRefused) {
  expect_config_error(folder_.path() + "/missing", "No such file or directory");
  test::write_file(folder_.path() + "/file", "x");
  expect_config_error(folder_.path() + "/file", "Not a directory");
  expect_config_error("/proc", "");  // nobody can write there
}

// The limit on a file's size stands for a disk's: a part is written, then nothing.
class SizeLimit {
 public:
  explicit SizeLimit(rlim_t bytes) {
    getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit limit{.rlim_cur = bytes, .rlim_max = before_.rlim_max};
    setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~SizeLimit() { setrlimit(RLIMIT_FSIZE, &before_); }

 private:
  rlimit before_ = {};
};

TEST_F(DiskStoreTest, AFullDiskIsAnErrorOfPutAndGet) {
  DiskStore store(folder_.path());
  const SizeLimit limit(250'000);
  const auto expect_error = [&](const auto& call) {
    try {
      call();
      FAIL() << "no error";
    } catch (const SystemError& error) {
      EXPECT_EQ(error.error_number(), EFBIG);
      EXPECT_THAT(error.what(),
                  AllOf(HasSubstr("cannot write 100000 bytes"), HasSubstr(folder_.path()),
                        HasSubstr("has 250000"), HasSubstr("File too large")));
    }
  };
  std::vector<Block> blocks;
  expect_error([&] {
    for (int i = 0; i < 10; ++i) blocks.push_back(put(store, data_of(100'000, i)));
  });
  ASSERT_GE(blocks.size(), 3U);
  expect_error([&] { store.get(blocks[2]); });
  expect_error([&] { store.get(blocks[0]); });
  expect_error([&] { blocks.push_back(put(store, data_of(1, 1))); });
  store.prefetch(blocks[0]);  // says nothing, does nothing
}

size_t free_in(const std::string& folder) {
  struct statvfs status {};
  return statvfs(folder.c_str(), &status) == 0 ? status.f_bavail * status.f_frsize : 0;
}

// With room for a megabyte. The store is still there when the disk has its space back.
std::string fill(const std::string& folder, const std::string& reason) {
  const size_t before = free_in(folder);
  DiskStore store(folder);
  std::vector<Block> blocks;
  try {
    for (int i = 0; i < 12; ++i) blocks.push_back(put(store, data_of(100'000, i)));
    wait_until_written(store);
    return "a full disk was not noticed";
  } catch (const SystemError& error) {
    const std::string text = error.what();
    for (const std::string& part : {std::string("[disk store] cannot write 100000 bytes"), folder,
                                    std::string(" are free"), reason}) {
      if (text.find(part) == std::string::npos) return text;
    }
  }
  return free_in(folder) == before ? "" : "the space is still taken";
}

// A file system of a megabyte, where this process may mount one; a limit of its files' size
// elsewhere.
TEST_F(DiskStoreTest, AFullDiskIsNamedAndHasItsSpaceBack) {
  EXPECT_EQ(test::in_a_process([&]() -> std::string {
              if ((unshare(CLONE_NEWNS) == 0 || unshare(CLONE_NEWUSER | CLONE_NEWNS) == 0) &&
                  mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
                  mount("none", folder_.path().c_str(), "tmpfs", 0, "size=1m") == 0) {
                return fill(folder_.path(), "No space left on device");
              }
              std::puts("no file system could be mounted");
              const SizeLimit limit(1 << 20);
              const std::string said = fill(folder_.path(), "File too large");
              return said == "the space is still taken" ? "" : said;  // others write there too
            }),
            "");
}

TEST_F(DiskStoreTest, AWaitingPutThrowsWhenTheDiskIsFull) {
  Gate gate;
  DiskStore store(folder_.path(), {.max_waiting = 1});
  const SizeLimit limit(50'000);
  const Block first = put(store, gate.block());
  gate.wait();
  const Block second = put(store, data_of(100'000, 1));
  std::thread opener([&] { gate.open(); });
  EXPECT_THROW(static_cast<void>(put(store, data_of(1, 1))), SystemError);
  opener.join();
}

}  // namespace
}  // namespace lockstep::memory
