// SPDX-License-Identifier: Apache-2.0
// A float32 array in two parts: codes, which a model computes with, and one byte for each element,
// which is what the array has beyond its codes, so that small updates add up (error feedback). What
// was joined is split as it was by bf16 and int8. The bits depend on the values alone. Private: not
// installed.
#pragma once

#include <cstddef>
#include <cstdint>

#include "lockstep/codec/codec.h"

namespace lockstep::codec {

// Whether a codec keeps an array so; others keep it whole (none) or as it is (lossless).
constexpr bool has_codes(Codec codec) {
  return codec == Codec::bf16 || codec == Codec::int8 || codec == Codec::quantization;
}

// What one unit of a remainder is worth, by the scale of the block: 1/256 of the step of int8, and
// of the widest gap of quantization. (For bf16 it is 1/256 of the code's last bit.)
inline constexpr float kEvenUnit = 1.f / (127 * 256);
inline constexpr float kDynamicUnit = 0.9f / 64 / 256;
// Remainders of quantization are cut off, so that none crosses the border to the next code; what
// was rounded when it was joined is not cut off again.
inline constexpr float kCutOff = 1.f / 256;

// Where elements are: `scales` is null for codecs without.
struct CodedArray {
  Codec codec = Codec::none;
  std::byte* codes = nullptr;
  float* scales = nullptr;
  int8_t* remainder = nullptr;

  // From element `begin` on, a multiple of kBlock.
  CodedArray from(int64_t begin) const;
};

// Bytes of the codes of so many elements, and of their scales.
size_t codes_size(Codec codec, int64_t elements);
size_t scales_size(Codec codec, int64_t elements);

// All for elements [0, count), which begin at a block. What a model computes with:
void decode_codes(const CodedArray& array, float* values, int64_t count);
// The whole, and back.
void join(const CodedArray& array, float* values, int64_t count);
void split(const float* values, const CodedArray& array, int64_t count);

}  // namespace lockstep::codec
