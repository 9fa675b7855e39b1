// SPDX-License-Identifier: Apache-2.0
#include "lockstep/memory/device_memory.h"

#include <ATen/ops/empty.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "lockstep/core/format.h"
#include "lockstep/core/size_text.h"
#include "lockstep/core/system_memory.h"
#include "lockstep/memory/arena.h"

namespace lockstep::memory {
namespace {

constexpr size_t kCudaBlock = 512;  // of which torch's allocator makes everything

size_t machine_memory() { return static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * page_size(); }

size_t rounded_to(size_t unit, size_t bytes) {
  return (std::max<size_t>(bytes, 1) + unit - 1) / unit * unit;
}

}  // namespace

struct DeviceMemory::Stretch {
  explicit Stretch(size_t size) : range(size, AddressRange::Access::none) {
    // A huge page may have memory for bytes that were never touched, and keeps it until all of it
    // goes.
    madvise(range.data(), range.size(), MADV_NOHUGEPAGE);
  }

  // A place in the first gap that is large enough, or at the end of the last; the stretch's size
  // where there is none, and the largest gap. With the lock.
  std::pair<size_t, size_t> find(size_t bytes, Stay stay) const {
    size_t begin = 0, largest = 0, place = range.size();
    const auto look = [&](size_t end) {
      const size_t gap = end - begin;
      largest = std::max(largest, gap);
      if (gap < bytes) return;
      if (stay == Stay::short_time)
        place = end - bytes;
      else if (place == range.size())
        place = begin;
    };
    for (const auto& [taken_begin, taken_end] : taken) {
      look(taken_begin);
      begin = taken_end;
    }
    look(range.size());
    return {place, largest};
  }

  void release(size_t begin, size_t bytes) {
    // Before the place can be found by another. Should the system refuse (too many mappings), the
    // memory is gone all the same, and only the fault at a late use is lost.
    madvise(range.data() + begin, bytes, MADV_DONTNEED);
    mprotect(range.data() + begin, bytes, PROT_NONE);
    const std::lock_guard lock(mutex);
    taken.erase(begin);
  }

  AddressRange range;
  std::mutex mutex;
  std::map<size_t, size_t> taken;  // begin -> end
};

DeviceMemory::DeviceMemory(c10::Device device, Budget budget)
    : device_(device), budget_(std::move(budget)) {
  if (!device_.is_cpu()) return;
  const size_t limit = budget_.limit();
  stretch_ = std::make_shared<Stretch>(rounded(limit > 0 ? limit : machine_memory()));
}

size_t DeviceMemory::rounded(size_t bytes) const {
  return rounded_to(device_.is_cpu() ? page_size() : kCudaBlock, bytes);
}

bool DeviceMemory::fits(size_t bytes) const {
  const size_t size = rounded(bytes);
  if (!budget_.fits(size)) return false;
  if (stretch_ == nullptr) return true;
  const std::lock_guard lock(stretch_->mutex);
  return stretch_->find(size, Stay::long_time).first < stretch_->range.size();
}

std::shared_ptr<void> DeviceMemory::take(size_t bytes, std::string_view what, Stay stay) const {
  const size_t size = rounded(bytes);
  auto share = std::make_shared<Budget::Share>(budget_.take(size, what));
  if (stretch_ == nullptr) {
    // An operator, because the first one makes the allocator ready.
    auto memory = std::make_shared<at::Tensor>(at::empty(
        {static_cast<int64_t>(size)}, at::TensorOptions().dtype(at::kByte).device(device_)));
    void* const data = memory->data_ptr();
    // The share goes last: a caller that the budget admits finds the memory.
    return {data, [share = std::move(share), memory = std::move(memory)](void*) mutable {
              memory.reset();
              share.reset();
            }};
  }
  size_t begin = 0;
  {
    const std::lock_guard lock(stretch_->mutex);
    const auto [place, gap] = stretch_->find(size, stay);
    if (place == stretch_->range.size()) {
      throw OverBudget(
          format("[{}] {} for {} do not fit: {} of {} are taken, but the largest gap is {}",
                 budget_.name(), size_text(size), what, size_text(budget_.used() - size),
                 size_text(stretch_->range.size()), size_text(gap)));
    }
    begin = place;
    stretch_->taken.emplace(begin, begin + size);
  }
  std::shared_ptr<void> taken(
      stretch_->range.data() + begin,
      [share = std::move(share), stretch = stretch_, begin, size](void*) mutable {
        stretch->release(begin, size);
        share.reset();
      });
  if (mprotect(taken.get(), size, PROT_READ | PROT_WRITE) != 0) {
    throw SystemError(format("[{}] cannot use {} for {}", budget_.name(), size_text(size), what),
                      errno);
  }
  return taken;
}

size_t DeviceMemory::resident() const {
  if (stretch_ == nullptr) return budget_.used();
  constexpr size_t kAtOnce = 1 << 16;
  const size_t page = page_size(), pages = stretch_->range.size() / page;
  std::vector<unsigned char> present(std::min(kAtOnce, pages));
  size_t count = 0;
  for (size_t first = 0; first < pages; first += kAtOnce) {
    const size_t some = std::min(kAtOnce, pages - first);
    if (mincore(stretch_->range.data() + first * page, some * page, present.data()) != 0) {
      throw SystemError(format("[{}] cannot count pages", budget_.name()), errno);
    }
    count += static_cast<size_t>(std::count_if(present.begin(), present.begin() + some,
                                               [](unsigned char bits) { return bits & 1; }));
  }
  return count * page;
}

}  // namespace lockstep::memory
