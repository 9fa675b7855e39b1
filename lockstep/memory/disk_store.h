// SPDX-License-Identifier: Apache-2.0
// Blocks of bytes that leave memory for a while, for a file without a name.
//
//   memory::DiskStore store("/scratch");
//   memory::DiskStore::Block block = store.put(bytes, owner);  // written concurrently
//   store.prefetch(block);                                     // read concurrently
//   std::shared_ptr<const std::byte> again = store.get(block);
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <utility>

namespace lockstep::memory {

struct DiskStoreOptions {
  // Blocks that may wait in memory to be written; put() waits where there are more. At least 1.
  size_t max_waiting = 2;
  // Blocks that may be in memory because of prefetch(); the one asked for first gives way to more.
  size_t max_ahead = 8;
  int rank = 0;  // to whose part of the trace reads and writes belong
};

// Bytes and blocks since the store was made. Counted, not computed.
struct DiskStoreStats {
  size_t bytes_written = 0, bytes_read = 0;
  size_t peak_memory = 0;  // bytes that waited to be written or for get(), at most
  size_t file_size = 0;    // bytes of the file that were in use, at most
  // Gets of blocks that were asked for before, that had not been, and that were not written yet.
  size_t ahead = 0, late = 0, from_memory = 0;
  bool direct = false;  // past the page cache, where the file system can do that
};

// One file, which has no name and so is gone with the process, however that ends. Its space is used
// again. Reads and writes are made by one thread, and fastest of bytes at the beginning of a page;
// their errors are thrown by put() and get(), and after the first one the store is of no more use
// and the disk has its space back. Thread safe.
class DiskStore {
 public:
  // What was put, until it is destroyed. May outlive the store.
  class Block;

  // ConfigError unless a file can be made in `folder`.
  explicit DiskStore(const std::string& folder, DiskStoreOptions options = {});
  ~DiskStore();
  DiskStore(const DiskStore&) = delete;
  DiskStore& operator=(const DiskStore&) = delete;

  // Keeps `owner`, and so the bytes, until they are written. They must not change.
  [[nodiscard]] Block put(std::span<const std::byte> bytes, std::shared_ptr<const void> owner);
  // Reads the block ahead of get(). Does nothing where that has begun.
  void prefetch(const Block& block);
  // The bytes, block.size() of them, at the beginning of a page if they were read. They are the
  // caller's: a second get() reads again.
  std::shared_ptr<const std::byte> get(const Block& block);

  DiskStoreStats stats() const;

 private:
  struct Entry;
  struct Shared;

  std::shared_ptr<Shared> shared_;
  std::jthread thread_;
};

class DiskStore::Block {
 public:
  Block() = default;
  Block(Block&& other) noexcept = default;
  Block& operator=(Block&& other) noexcept;
  ~Block();

  size_t size() const;

 private:
  friend class DiskStore;
  Block(std::shared_ptr<Shared> shared, std::shared_ptr<Entry> entry)
      : shared_(std::move(shared)), entry_(std::move(entry)) {}

  std::shared_ptr<Shared> shared_;
  std::shared_ptr<Entry> entry_;
};

}  // namespace lockstep::memory
