// SPDX-License-Identifier: Apache-2.0
// What the CPU computes for one new token: products of few vectors with a matrix that is read once,
// and attention to keys that are in memory already. Compiled once for each instruction set that
// matters (LOCKSTEP_ISA). A vector's result does not depend on the others that it is computed with.
// Private: not installed.
#pragma once

#include <cstdint>

namespace lockstep::nn {

// Of float32, or of bfloat16 as its bits; sums are float32.
template <class T>
struct DecodeKernels {
  // out[v][r] = x[v] . weight[r] for vectors v of `vectors`, at most kMostVectors, and rows r in
  // [begin, end). x is (vectors, width), weight (rows, width), out (vectors, rows).
  void (*multiply)(const T* weight, const float* x, float* out, int64_t vectors, int64_t width,
                   int64_t rows, int64_t begin, int64_t end);
  // For `queries` of `width` elements each that share keys and values: softmax(scale q k^T) v over
  // `length` of them. `scores` has room for `length` numbers.
  void (*attend)(const float* query, const T* keys, const T* values, float* out, float* scores,
                 int64_t queries, int64_t length, int64_t width, float scale);
};

inline constexpr int64_t kMostVectors = 8;

namespace baseline {
extern const DecodeKernels<float> kDecodeFloat;
extern const DecodeKernels<uint16_t> kDecodeBFloat16;
}  // namespace baseline
namespace x86_v3 {  // AVX2, FMA
extern const DecodeKernels<float> kDecodeFloat;
extern const DecodeKernels<uint16_t> kDecodeBFloat16;
}  // namespace x86_v3

// The best that this processor can run.
const DecodeKernels<float>& float_decode_kernels();
const DecodeKernels<uint16_t>& bfloat16_decode_kernels();

}  // namespace lockstep::nn
