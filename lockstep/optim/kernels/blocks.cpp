// SPDX-License-Identifier: Apache-2.0
#include "lockstep/optim/kernels/blocks.h"

#include <ATen/ATen.h>
#include <ATen/TensorIterator.h>

#include <algorithm>

namespace lockstep::optim::detail {
namespace {

// at::parallel_for is a header and silently serial in code that is not compiled with libtorch's own
// OpenMP; the loop of a TensorIterator is compiled into libtorch and runs on its threads. So
// iterate over an array of `count` bytes that is never touched: addresses are the indices.
void parallel_for(int64_t count, const std::function<void(int64_t, int64_t)>& body) {
  if (count == 1) return body(0, 1);
  const at::Tensor indices = at::empty({count}, at::kByte);
  const char* first = static_cast<const char*>(indices.data_ptr());
  auto iterator = at::TensorIteratorConfig()
                      .set_check_mem_overlap(false)
                      .check_all_same_dtype(false)
                      .resize_outputs(false)
                      .add_output(indices)
                      .build();
  iterator.for_each(
      // With one dimension there is one row.
      [&](char** data, const int64_t*, int64_t size, int64_t rows) {
        const int64_t begin = data[0] - first;
        body(begin, begin + size * rows);
      },
      /*grain_size=*/1);
}

}  // namespace

void Blocks::add(int64_t elements) {
  arrays_.push_back({elements_, size_, elements});
  elements_ += elements;
  size_ += (elements + kElements - 1) / kElements;
}

void Blocks::for_each(const std::function<void(const Block&)>& body) const {
  if (elements_ == 0) return;
  parallel_for((elements_ + kElements - 1) / kElements,
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
