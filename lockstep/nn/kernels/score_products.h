// SPDX-License-Identifier: Apache-2.0
// Products of batches of matrices, and loops over rows of attention scores. Private: not installed.
#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <cstdint>

#include "lockstep/memory/threads/parallel_for.h"

namespace lockstep::nn {

// bmm, on the CPU matrix by matrix: oneDNN, which libtorch would take for it on arm64, is slower
// than the BLAS.
inline at::Tensor batch_product(const at::Tensor& a, const at::Tensor& b) {
  if (!a.is_cpu()) return at::bmm(a, b);
  at::Tensor out = at::empty({a.size(0), a.size(1), b.size(2)}, a.options());
  for (int64_t i = 0; i < a.size(0); ++i) {
    at::Tensor part = out.select(0, i);
    at::mm_out(part, a.select(0, i), b.select(0, i));
  }
  return out;
}
// sum += a b
inline void add_batch_product(const at::Tensor& sum, const at::Tensor& a, const at::Tensor& b) {
  if (!a.is_cpu()) {
    sum.baddbmm_(a, b);
    return;
  }
  for (int64_t i = 0; i < a.size(0); ++i) {
    sum.select(0, i).addmm_(a.select(0, i), b.select(0, i));
  }
}

// Calls body(row, its values) for the rows of the last dimension, in parallel.
template <class Body>
void for_score_rows(const at::Tensor& tensor, Body body) {
  const int64_t width = tensor.size(-1), rows = tensor.numel() / width;
  auto* const data = tensor.data_ptr<float>();
  memory::parallel_for(rows, std::max<int64_t>((1 << 15) / width, 1),
                       [&](int64_t begin, int64_t end) {
                         for (int64_t row = begin; row < end; ++row) body(row, data + row * width);
                       });
}

}  // namespace lockstep::nn
