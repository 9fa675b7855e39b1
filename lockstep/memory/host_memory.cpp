// SPDX-License-Identifier: Apache-2.0
#include "lockstep/memory/host_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "lockstep/core/format.h"
#include "lockstep/core/size_text.h"
#include "lockstep/core/system_memory.h"
#include "lockstep/memory/pinning/pinning.h"

namespace lockstep::memory {
namespace {

constexpr size_t kLarge = size_t{64} << 20;
constexpr size_t kMostThreads = 8;

// The kernel zeroes pages when they are first written to, which takes longer than anything else.
void touch(std::span<std::byte> pages) {
  for (size_t at = 0; at < pages.size(); at += page_size()) {
    static_cast<volatile std::byte&>(pages[at]) = std::byte{0};
  }
}

void bring_in(std::span<std::byte> pages) {
  const size_t cores = std::max<size_t>(std::thread::hardware_concurrency(), 1);
  const size_t threads = pages.size() < kLarge ? 1 : std::min(kMostThreads, cores);
  const size_t part = (pages.size() / threads / page_size() + 1) * page_size();
  std::vector<std::jthread> others;
  for (size_t begin = part; begin < pages.size(); begin += part) {
    others.emplace_back(touch, pages.subspan(begin, std::min(part, pages.size() - begin)));
  }
  touch(pages.first(std::min(part, pages.size())));
}

// Pages, and what was done for them: undone in the opposite order, also halfway.
class Pages {
 public:
  Pages(Budget::Share share, std::string_view what) : share_(std::move(share)) {
    void* const start =
        mmap(nullptr, share_.bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start == MAP_FAILED) {
      throw SystemError(
          format("[host memory] cannot allocate {} for {}", size_text(share_.bytes()), what),
          errno);
    }
    bytes_ = {static_cast<std::byte*>(start), share_.bytes()};
    madvise(bytes_.data(), bytes_.size(), MADV_HUGEPAGE);
  }
  ~Pages() {
    if (registered_) detail::cuda::unregister_pages(bytes_);
    if (!bytes_.empty()) munmap(bytes_.data(), bytes_.size());  // and unlocks
  }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;

  void pin_and_bring_in(const Budget& budget, std::string_view what) {
    if (!detail::cuda::has_device()) {
      detail::lock_pages(bytes_, what);
      bring_in(bytes_);
      return;
    }
    bring_in(bytes_);
    const std::string refusal = detail::cuda::register_pages(bytes_);
    registered_ = refusal.empty();
    if (!registered_) {
      throw Error(
          format("[host memory] CUDA cannot pin {} for {}: {}; {} of {} are taken already ({}); "
                 "lower that, or set offload.pin to false",
                 size_text(bytes_.size()), what, refusal, size_text(budget.used() - bytes_.size()),
                 budget.limit() == 0 ? "no limit" : size_text(budget.limit()), budget.name()));
    }
  }
  std::span<std::byte> bytes() const { return bytes_; }

 private:
  Budget::Share share_;  // returned last
  std::span<std::byte> bytes_;
  bool registered_ = false;
};

}  // namespace

HostMemory::HostMemory(Budget budget, HostKind kind) : budget_(std::move(budget)), kind_(kind) {}

size_t HostMemory::rounded(size_t bytes) {
  const size_t page = page_size();
  return (std::max<size_t>(bytes, 1) + page - 1) / page * page;
}

std::shared_ptr<std::byte> HostMemory::take(size_t bytes, std::string_view what) const {
  const auto pages = std::make_shared<Pages>(budget_.take(rounded(bytes), what), what);
  if (kind_ == HostKind::pinned) {
    pages->pin_and_bring_in(budget_, what);
  } else {
    bring_in(pages->bytes());
  }
  return {pages, pages->bytes().data()};
}

}  // namespace lockstep::memory
