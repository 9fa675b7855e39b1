// SPDX-License-Identifier: Apache-2.0
#include "tests/fault/freed_memory.h"

#include <malloc.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>
#include <span>

namespace {

constexpr char kMark = 'x';

std::atomic<bool> keeping{false};
// Filled from the front; a vector would allocate.
std::array<std::atomic<char*>, 1 << 20> kept;
std::atomic<size_t> num_kept{0};

}  // namespace

void operator delete(void* data) noexcept {
  if (!keeping || data == nullptr) return std::free(data);
  std::memset(data, kMark, malloc_usable_size(data));
  const size_t place = num_kept++;
  if (place < kept.size()) kept[place] = static_cast<char*>(data);
}
void operator delete(void* data, size_t) noexcept { operator delete(data); }

namespace lockstep::test {

void keep_freed_memory() { keeping = true; }

bool is_freed_memory_untouched() {
  if (num_kept > kept.size()) return false;  // some were not kept
  return std::all_of(kept.begin(), kept.begin() + num_kept, [](char* data) {
    const auto bytes = std::span(data, data == nullptr ? 0 : malloc_usable_size(data));
    return std::all_of(bytes.begin(), bytes.end(), [](char byte) { return byte == kMark; });
  });
}

}  // namespace lockstep::test
