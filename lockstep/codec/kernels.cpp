// SPDX-License-Identifier: Apache-2.0
#include "lockstep/codec/kernels.h"

#include <bit>
#include <cstring>

#include "lockstep/codec/dynamic_map.h"
#include "lockstep/core/float16.h"

#ifndef LOCKSTEP_ISA
#define LOCKSTEP_ISA baseline
#endif

namespace lockstep::codec::detail::LOCKSTEP_ISA {
namespace {

constexpr uint32_t kMagnitude = 0x7fffffff, kInfinity = 0x7f800000, kNan = 0x7fc00000;

uint32_t magnitude(float value) { return std::bit_cast<uint32_t>(value) & kMagnitude; }

// Without their signs floats order like their bits, with infinity and NaN above all numbers.
uint32_t largest_magnitude(const float* values, int64_t count) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = magnitude(values[i]);
    largest = bits > largest ? bits : largest;
  }
  return largest;
}

// ---- 16 bits ----

template <class T>
void narrow_all(const float* values, std::byte* codes, float*, int64_t count, const DynamicMap&) {
  T* __restrict to = reinterpret_cast<T*>(codes);
  for (int64_t i = 0; i < count; ++i) to[i] = narrow<T>(values[i]);
}

template <class T>
void widen_all(const std::byte* codes, const float*, float* values, int64_t count,
               const DynamicMap&) {
  const T* __restrict from = reinterpret_cast<const T*>(codes);
  for (int64_t i = 0; i < count; ++i) values[i] = widen(from[i]);
}

void copy_in(const float* values, std::byte* codes, float*, int64_t count, const DynamicMap&) {
  std::memcpy(codes, values, static_cast<size_t>(count) * sizeof(float));
}
void copy_out(const std::byte* codes, const float*, float* values, int64_t count,
              const DynamicMap&) {
  std::memcpy(values, codes, static_cast<size_t>(count) * sizeof(float));
}

// ---- 8 bits, even steps ----

// A sum with it is rounded to a whole number, to nearest even, which is in its last bits.
constexpr float kWhole = 12582912;  // 1.5 * 2^23

template <Sign sign>
constexpr float kSteps = sign == Sign::any ? 127 : 255;

// `ratio` is at most 1. The two products with kSteps and its inverse give exactly 1 for 1, so that
// the largest value is kept as it is and what was decoded is encoded as it was.
template <Sign sign>
uint8_t even_code(float ratio) {
  if constexpr (sign == Sign::non_negative) ratio = ratio > 0 ? ratio : 0;
  return static_cast<uint8_t>(std::bit_cast<uint32_t>(ratio * kSteps<sign> + kWhole));
}

template <Sign sign>
float even_value(uint8_t code) {
  const float step = sign == Sign::any ? static_cast<int8_t>(code) : code;
  return step * (1 / kSteps<sign>);
}

template <Sign sign>
void encode_even(const float* __restrict values, uint8_t* __restrict codes, float scale,
                 int64_t count, const DynamicMap&) {
  for (int64_t i = 0; i < count; ++i) codes[i] = even_code<sign>(values[i] / scale);
}

template <Sign sign>
void decode_even(const std::byte* codes, const float* scales, float* values, int64_t count,
                 const DynamicMap&) {
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const auto* __restrict from = reinterpret_cast<const uint8_t*>(codes) + begin;
    float* __restrict to = values + begin;
    const float scale = scales[begin / kBlock];
    const int64_t size = count - begin < kBlock ? count - begin : kBlock;
    for (int64_t i = 0; i < size; ++i) to[i] = even_value<sign>(from[i]) * scale;
  }
}

// ---- 8 bits, dynamic map ----

// Three loops, because the one in the middle looks things up, which not every processor has vector
// instructions for.
template <Sign sign>
void encode_dynamic(const float* __restrict values, uint8_t* __restrict codes, float scale,
                    int64_t count, const DynamicMap& map) {
  uint32_t distances[kBlock];
  uint8_t steps[kBlock];
  for (int64_t i = 0; i < count; ++i) {
    float ratio = values[i] / scale;
    if constexpr (sign == Sign::non_negative) ratio = ratio > 0 ? ratio : 0;
    distances[i] = DynamicMap::distance(magnitude(ratio));
  }
  const uint32_t* __restrict cells = map.cells;
#pragma GCC unroll 8
  for (int64_t i = 0; i < count; ++i) {
    steps[i] = static_cast<uint8_t>(DynamicMap::step(cells, distances[i]));
  }
  if constexpr (sign == Sign::non_negative) {
    std::memcpy(codes, steps, static_cast<size_t>(count));
    return;
  }
  const auto zero = static_cast<uint8_t>(map.zero), last = static_cast<uint8_t>(map.last_negative);
  // The quotient is negative where the signs differ.
  const uint32_t flip = std::bit_cast<uint32_t>(scale) & ~kMagnitude;
  for (int64_t i = 0; i < count; ++i) {
    const bool negative = ((std::bit_cast<uint32_t>(values[i]) ^ flip) & ~kMagnitude) != 0;
    const uint8_t below = steps[i] < last ? steps[i] : last;
    codes[i] = static_cast<uint8_t>(negative ? zero - below : zero + steps[i]);
  }
}

void decode_dynamic(const std::byte* codes, const float* scales, float* values, int64_t count,
                    const DynamicMap& map) {
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const auto* __restrict from = reinterpret_cast<const uint8_t*>(codes) + begin;
    float* __restrict to = values + begin;
    const float scale = scales[begin / kBlock];
    const int64_t size = count - begin < kBlock ? count - begin : kBlock;
    for (int64_t i = 0; i < size; ++i) to[i] = map.values[from[i]] * scale;
  }
}

// ---- blocks ----

using EncodeBlock = void (*)(const float*, uint8_t*, float, int64_t, const DynamicMap&);

// The map has 1 but not -1, so that quantization's scale has the sign of the largest magnitude,
// positive where it occurs with both.
template <Codec codec, Sign sign>
float scale_of(const float* values, int64_t count, uint32_t largest) {
  if constexpr (codec == Codec::quantization && sign == Sign::any) {
    uint32_t positive = 0;
    for (int64_t i = 0; i < count; ++i) {
      positive |= std::bit_cast<uint32_t>(values[i]) == largest ? 1 : 0;
    }
    if (positive == 0) largest |= ~kMagnitude;
  }
  return std::bit_cast<float>(largest);
}

template <Codec codec, Sign sign, EncodeBlock encode>
void encode_blocks(const float* values, std::byte* codes, float* scales, int64_t count,
                   const DynamicMap& map) {
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const float* from = values + begin;
    auto* to = reinterpret_cast<uint8_t*>(codes) + begin;
    float& scale = scales[begin / kBlock];
    const int64_t size = count - begin < kBlock ? count - begin : kBlock;
    const uint32_t largest = largest_magnitude(from, size);
    if (largest == 0 || largest >= kInfinity) {
      scale = std::bit_cast<float>(largest == 0 ? 0 : kNan);
      std::memset(to, codec == Codec::quantization ? map.zero : 0, static_cast<size_t>(size));
    } else {
      scale = scale_of<codec, sign>(from, size, largest);
      encode(from, to, scale, size, map);
    }
  }
}

template <Codec codec, Sign sign>
EncodeKernel encoder() {
  if constexpr (codec == Codec::int8) {
    return encode_blocks<codec, sign, encode_even<sign>>;
  } else {
    return encode_blocks<codec, sign, encode_dynamic<sign>>;
  }
}

EncodeKernel find_encode(Codec codec, Sign sign) {
  switch (codec) {
    case Codec::none:
      return copy_in;
    case Codec::fp16:
      return narrow_all<Half>;
    case Codec::bf16:
      return narrow_all<BFloat16>;
    case Codec::int8:
      return sign == Sign::any ? encoder<Codec::int8, Sign::any>()
                               : encoder<Codec::int8, Sign::non_negative>();
    case Codec::quantization:
      return sign == Sign::any ? encoder<Codec::quantization, Sign::any>()
                               : encoder<Codec::quantization, Sign::non_negative>();
    case Codec::lossless:
      break;
  }
  return nullptr;
}

DecodeKernel find_decode(Codec codec, Sign sign) {
  switch (codec) {
    case Codec::none:
      return copy_out;
    case Codec::fp16:
      return widen_all<Half>;
    case Codec::bf16:
      return widen_all<BFloat16>;
    case Codec::int8:
      return sign == Sign::any ? decode_even<Sign::any> : decode_even<Sign::non_negative>;
    case Codec::quantization:
      return decode_dynamic;
    case Codec::lossless:
      break;
  }
  return nullptr;
}

}  // namespace

const Kernels kKernels = {find_encode, find_decode};

}  // namespace lockstep::codec::detail::LOCKSTEP_ISA
