// SPDX-License-Identifier: Apache-2.0
#include "lockstep/nn/kernels/decode_kernels.h"

#include <bit>

#include "lockstep/nn/kernels/activation_kernels.h"

#ifndef LOCKSTEP_ISA
#define LOCKSTEP_ISA baseline
#endif

namespace lockstep::nn::LOCKSTEP_ISA {
namespace {

// Sums are kept in lanes, which vector instructions can hold, and combined in a fixed order.
constexpr int64_t kLanes = 32;

inline float widened(float value) { return value; }
inline float widened(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

inline float combined(float (&lanes)[kLanes]) {
  for (int64_t width = kLanes / 2; width > 0; width /= 2) {
    for (int64_t lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  }
  return lanes[0];
}

template <class T>
inline float product(const T* __restrict a, const float* __restrict b, int64_t width) {
  float lanes[kLanes] = {};
  const int64_t whole = width / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] += widened(a[i + lane]) * b[i + lane];
  }
  for (int64_t i = whole; i < width; ++i) lanes[i - whole] += widened(a[i]) * b[i];
  return combined(lanes);
}

template <class T>
void multiply(const T* weight, const float* x, float* out, int64_t vectors, int64_t width,
              int64_t rows, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* const line = weight + row * width;
    // After the first the row is in the cache.
    for (int64_t vector = 0; vector < vectors; ++vector)
      out[vector * rows + row] = product(line, x + vector * width, width);
  }
}

template <class T>
void attend(const float* query, const T* keys, const T* values, float* out, float* scores,
            int64_t queries, int64_t length, int64_t width, float scale) {
  for (int64_t q = 0; q < queries; ++q) {
    for (int64_t i = 0; i < length; ++i)
      scores[i] = product(keys + i * width, query + q * width, width);
    kActivations.softmax(scores, length, length, scale);
    float* const __restrict sum = out + q * width;
    for (int64_t d = 0; d < width; ++d) sum[d] = 0;
    for (int64_t i = 0; i < length; ++i) {
      const T* const __restrict value = values + i * width;
      const float weight = scores[i];
#pragma GCC ivdep
      for (int64_t d = 0; d < width; ++d) sum[d] += weight * widened(value[d]);
    }
  }
}

}  // namespace

const DecodeKernels<float> kDecodeFloat{multiply<float>, attend<float>};
const DecodeKernels<uint16_t> kDecodeBFloat16{multiply<uint16_t>, attend<uint16_t>};

}  // namespace lockstep::nn::LOCKSTEP_ISA
