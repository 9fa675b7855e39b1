// SPDX-License-Identifier: Apache-2.0
#include "lockstep/memory/threads/parallel_for.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/TensorIterator.h>

#include <algorithm>

namespace lockstep::memory {

// The loop of a TensorIterator is compiled into libtorch and runs on its threads. So iterate over
// an array of a byte for each part that is never touched: addresses are the indices.
void parallel_for(int64_t count, int64_t grain,
                  const std::function<void(int64_t begin, int64_t end)>& body) {
  if (count <= 0) return;
  const int64_t size = std::max<int64_t>(grain, 1), parts = (count + size - 1) / size;
  if (parts == 1 || at::get_num_threads() == 1) return body(0, count);
  const at::Tensor indices = at::empty({parts}, at::kByte);
  const char* const first = static_cast<const char*>(indices.data_ptr());
  auto iterator = at::TensorIteratorConfig()
                      .set_check_mem_overlap(false)
                      .check_all_same_dtype(false)
                      .resize_outputs(false)
                      .add_output(indices)
                      .build();
  iterator.for_each(
      // With one dimension there is one row.
      [&](char** data, const int64_t*, int64_t elements, int64_t rows) {
        const int64_t begin = data[0] - first, end = begin + elements * rows;
        body(begin * size, std::min(end * size, count));
      },
      /*grain_size=*/1);
}

}  // namespace lockstep::memory
