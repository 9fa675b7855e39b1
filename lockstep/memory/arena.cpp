// SPDX-License-Identifier: Apache-2.0
#include "lockstep/memory/arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/system_memory.h"

namespace lockstep::memory {
namespace {

constexpr size_t kAlignment = 64;

size_t rounded(size_t bytes) {
  return std::max(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
}

}  // namespace

AddressRange::AddressRange(size_t bytes, Access access) : size_(std::max<size_t>(bytes, 1)) {
  const int protection = access == Access::none ? PROT_NONE : PROT_READ | PROT_WRITE;
  void* const start =
      mmap(nullptr, size_, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (start == MAP_FAILED) {
    throw SystemError(format("cannot reserve {} bytes of addresses", size_), errno);
  }
  data_ = static_cast<std::byte*>(start);
}

AddressRange::~AddressRange() {
  if (data_ != nullptr) munmap(data_, size_);
}

void AddressRange::set_access(Access access) {
  const int protection = access == Access::none ? PROT_NONE : PROT_READ | PROT_WRITE;
  if (mmap(data_, size_, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1,
           0) == MAP_FAILED) {
    throw SystemError(format("cannot change the access to {} bytes of addresses", size_), errno);
  }
}

AddressRange::AddressRange(AddressRange&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

AddressRange& AddressRange::operator=(AddressRange&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

void give_back_pages(std::span<std::byte> bytes) {
  const auto page = static_cast<uintptr_t>(page_size());
  const auto start = reinterpret_cast<uintptr_t>(bytes.data());
  const uintptr_t begin = (start + page - 1) / page * page;
  const uintptr_t end = (start + bytes.size()) / page * page;
  if (begin >= end) return;
  void* const first = bytes.data() + (begin - start);
  // REMOVE is for shared memory, which DONTNEED would only unmap here.
  if (madvise(first, end - begin, MADV_REMOVE) == 0) return;
  madvise(first, end - begin, MADV_DONTNEED);
}

struct Arena::Books {
  explicit Books(size_t capacity) : range(rounded(capacity), AddressRange::Access::read_write) {}

  AddressRange range;
  mutable std::mutex mutex;
  std::map<size_t, size_t> taken;  // begin -> end
  ArenaStats stats;
};

Arena::Arena(size_t capacity) : books_(std::make_shared<Books>(capacity)) {}

std::shared_ptr<std::byte> Arena::take(size_t bytes, size_t room) {
  const size_t size = rounded(bytes), place = rounded(std::max(bytes, room));
  const std::lock_guard lock(books_->mutex);
  size_t begin = 0;
  for (const auto& [taken_begin, taken_end] : books_->taken) {
    if (taken_begin - begin >= place) break;
    begin = taken_end;
  }
  if (begin + place > books_->range.size()) {
    throw Error(format("[arena] no room for {} bytes: {} of {} are in use", bytes,
                       books_->stats.used, books_->range.size()));
  }
  books_->taken.emplace(begin, begin + place);
  ArenaStats& stats = books_->stats;
  stats.used += size;
  stats.peak = std::max(stats.peak, stats.used);
  if (begin + size > stats.resident) {
    stats.resident = begin + size;
    ++stats.growths;
  }
  return {books_->range.data() + begin, [books = books_, begin, size](std::byte*) {
            const std::lock_guard release(books->mutex);
            books->taken.erase(begin);
            books->stats.used -= size;
          }};
}

ArenaStats Arena::stats() const {
  const std::lock_guard lock(books_->mutex);
  return books_->stats;
}

}  // namespace lockstep::memory
