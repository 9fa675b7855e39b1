// SPDX-License-Identifier: Apache-2.0
// Memory for buffers that come and go in every step.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <span>

namespace lockstep::memory {

// A stretch of addresses, returned when it goes. Nothing is behind them until they are written to;
// those that are inaccessible fault at the first use.
class AddressRange {
 public:
  enum class Access { none, read_write };

  AddressRange() = default;
  AddressRange(size_t bytes, Access access);
  ~AddressRange();
  AddressRange(AddressRange&& other) noexcept;
  AddressRange& operator=(AddressRange&& other) noexcept;

  std::byte* data() const { return data_; }
  size_t size() const { return size_; }
  // What was behind the addresses is gone where they become inaccessible, and is zero when they are
  // accessible again.
  void set_access(Access access);

 private:
  std::byte* data_ = nullptr;
  size_t size_ = 0;
};

// The whole pages in these bytes have nothing behind them any more, and read as zeros until they
// are written to again; on all ranks, where the memory is shared. Pinned pages keep what they have.
void give_back_pages(std::span<std::byte> bytes);

struct ArenaStats {
  size_t used = 0;      // bytes in use now
  size_t peak = 0;      // bytes in use at most
  size_t resident = 0;  // bytes that were ever in use at the same place: what the arena occupies
  size_t growths = 0;   // how often `resident` has risen
};

// Buffers are put where the first gap is large enough, in one reserved stretch of addresses, so
// that the same sequence of buffers needs the same memory again and again, and no more of it than
// the largest set that lives at one time, and gaps. Thread safe. Buffers may outlive the arena.
class Arena {
 public:
  // `capacity`: the most that can be in use at one time. Only what is used takes memory.
  explicit Arena(size_t capacity);

  // Aligned to 64 bytes. With `room` for more than that, so that a larger one can have its place
  // later; the rest stays untouched. Throws Error where there is no gap.
  std::shared_ptr<std::byte> take(size_t bytes, size_t room = 0);
  ArenaStats stats() const;

 private:
  struct Books;
  std::shared_ptr<Books> books_;
};

}  // namespace lockstep::memory
