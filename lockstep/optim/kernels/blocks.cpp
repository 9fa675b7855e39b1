// SPDX-License-Identifier: Apache-2.0
#include "lockstep/optim/kernels/blocks.h"

#include <algorithm>

#include "lockstep/memory/threads/parallel_for.h"

namespace lockstep::optim::detail {
void Blocks::add(int64_t elements) {
  arrays_.push_back({elements_, size_, elements});
  elements_ += elements;
  size_ += (elements + kElements - 1) / kElements;
}

void Blocks::for_each(const std::function<void(const Block&)>& body) const {
  if (elements_ == 0) return;
  memory::parallel_for(
      (elements_ + kElements - 1) / kElements, /*grain=*/1,
      [&](int64_t begin, int64_t end) { run(begin * kElements, end * kElements, body); });
}

void Blocks::run(int64_t begin, int64_t end, const std::function<void(const Block&)>& body) const {
  // The array that holds element `begin`.
  auto array =
      std::upper_bound(arrays_.begin(), arrays_.end(), begin,
                       [](int64_t element, const Array& a) { return element < a.first_element; });
  for (--array; array != arrays_.end() && array->first_element < end; ++array) {
    const int64_t skipped = std::max<int64_t>(0, begin - array->first_element);
    for (int64_t block = (skipped + kElements - 1) / kElements;; ++block) {
      const int64_t first = block * kElements;
      if (first >= array->elements || array->first_element + first >= end) break;
      body({array - arrays_.begin(), first, std::min(first + kElements, array->elements),
            array->first_block + block});
    }
  }
}

}  // namespace lockstep::optim::detail
