// SPDX-License-Identifier: Apache-2.0
#include "lockstep/codec/master.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "lockstep/codec/kernels.h"
#include "lockstep/core/float16.h"

namespace lockstep::codec {
namespace {

constexpr float kLargest = 127;     // strictly inside the cell of a code
constexpr float kWhole = 12582912;  // 1.5 * 2^23: a sum with it is rounded to a whole number

float clamped(float units) {
  return units > kLargest ? kLargest : units < -kLargest ? -kLargest : units;
}

float unit_of(Codec codec, float scale) {
  return std::fabs(scale) * (codec == Codec::int8 ? kEvenUnit : kDynamicUnit);
}

int8_t nearest(float units) {
  return static_cast<int8_t>(std::bit_cast<uint32_t>(clamped(units) + kWhole));
}

int8_t cut_off(float units) {
  return static_cast<int8_t>(static_cast<int32_t>(clamped(units + std::copysign(kCutOff, units))));
}

void join_bf16(const CodedArray& array, float* __restrict values, int64_t count) {
  const auto* __restrict codes = reinterpret_cast<const uint16_t*>(array.codes);
  const int8_t* __restrict remainder = array.remainder;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t upper = static_cast<uint32_t>(codes[i]) << 16;
    values[i] = std::bit_cast<float>(upper + static_cast<uint32_t>(remainder[i] * 256));
  }
}

void split_bf16(const float* __restrict values, const CodedArray& array, int64_t count) {
  auto* __restrict codes = reinterpret_cast<BFloat16*>(array.codes);
  int8_t* __restrict remainder = array.remainder;
  for (int64_t i = 0; i < count; ++i) {
    codes[i] = narrow<BFloat16>(values[i]);
    const auto beyond = static_cast<int32_t>(std::bit_cast<uint32_t>(values[i]) -
                                             (static_cast<uint32_t>(codes[i].bits) << 16));
    const int32_t units = (beyond + 128) >> 8;
    remainder[i] = static_cast<int8_t>(units > 127 ? 127 : units < -127 ? -127 : units);
  }
}

// Calls body(begin, size) for each block.
template <class Body>
void for_each_block(int64_t count, const Body& body) {
  for (int64_t begin = 0; begin < count; begin += kBlock)
    body(begin, std::min(kBlock, count - begin));
}

size_t code_width(Codec codec) { return codec == Codec::bf16 ? 2 : 1; }

}  // namespace

CodedArray CodedArray::from(int64_t begin) const {
  return {.codec = codec,
          .codes = codes + static_cast<size_t>(begin) * code_width(codec),
          .scales = scales == nullptr ? nullptr : scales + begin / kBlock,
          .remainder = remainder == nullptr ? nullptr : remainder + begin};
}

size_t codes_size(Codec codec, int64_t elements) {
  return static_cast<size_t>(elements) * code_width(codec);
}

size_t scales_size(Codec codec, int64_t elements) {
  if (codec == Codec::bf16) return 0;
  return static_cast<size_t>((elements + kBlock - 1) / kBlock) * sizeof(float);
}

void decode_codes(const CodedArray& array, float* values, int64_t count) {
  detail::kernels().decode(array.codec, Sign::any)(array.codes, array.scales, values, count,
                                                   detail::map_of(Sign::any));
}

void join(const CodedArray& array, float* values, int64_t count) {
  if (array.codec == Codec::bf16) return join_bf16(array, values, count);
  decode_codes(array, values, count);
  for_each_block(count, [&](int64_t begin, int64_t size) {
    const float unit = unit_of(array.codec, array.scales[begin / kBlock]);
    float* __restrict to = values + begin;
    const int8_t* __restrict remainder = array.remainder + begin;
    for (int64_t i = 0; i < size; ++i) to[i] = to[i] + static_cast<float>(remainder[i]) * unit;
  });
}

void split(const float* values, const CodedArray& array, int64_t count) {
  if (array.codec == Codec::bf16) return split_bf16(values, array, count);
  detail::kernels().encode(array.codec, Sign::any)(values, array.codes, array.scales, count,
                                                   detail::map_of(Sign::any));
  for_each_block(count, [&](int64_t begin, int64_t size) {
    float coded[kBlock];
    decode_codes(array.from(begin), coded, size);
    const float unit = unit_of(array.codec, array.scales[begin / kBlock]);
    int8_t* __restrict remainder = array.remainder + begin;
    const float* __restrict from = values + begin;
    if (!(unit > 0)) {  // all zero, or not finite
      std::memset(remainder, 0, static_cast<size_t>(size));
    } else if (array.codec == Codec::int8) {
      for (int64_t i = 0; i < size; ++i) remainder[i] = nearest((from[i] - coded[i]) / unit);
    } else {
      for (int64_t i = 0; i < size; ++i) remainder[i] = cut_off((from[i] - coded[i]) / unit);
    }
  });
}

}  // namespace lockstep::codec
