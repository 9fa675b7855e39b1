// SPDX-License-Identifier: Apache-2.0
// The two 8-bit float formats, in software: e4m3 (no infinity, largest 448) for activations and
// weights, e5m2 (largest 57344) for gradients. Private: not installed.
#pragma once

#include <bit>
#include <cstdint>

namespace lockstep::nn {

enum class Float8 { e4m3, e5m2 };

struct Float8Format {
  int mantissa, bias;
  float largest;
  uint8_t largest_code;
};

constexpr Float8Format format_of(Float8 kind) {
  return kind == Float8::e4m3 ? Float8Format{3, 7, 448, 0x7E} : Float8Format{2, 15, 57344, 0x7B};
}

constexpr float kLeastAmax = 1e-12F;  // zeros have a scale too

// A tensor is stored as codes of its values times this. NaN and infinity in amax make codes that
// are NaN, so that a bad gradient is noticed as in any other type.
constexpr float float8_scale(float amax, Float8 kind) {
  return format_of(kind).largest / (amax < kLeastAmax ? kLeastAmax : amax);
}

// Rounds to nearest even. Values beyond the largest, infinity too, become the largest.
constexpr uint8_t encode_float8(float value, Float8 kind) {
  const Float8Format format = format_of(kind);
  const auto bits = std::bit_cast<uint32_t>(value);
  const auto sign = static_cast<uint8_t>(bits >> 31U << 7U);
  uint32_t magnitude = bits & 0x7FFFFFFFU;
  if (magnitude > 0x7F800000U) return sign | 0x7F;  // NaN
  const auto size = std::bit_cast<float>(magnitude);
  if (size >= format.largest) return sign | format.largest_code;
  const auto shift = static_cast<uint32_t>(23 - format.mantissa);
  const auto exponents = static_cast<uint32_t>(127 - format.bias);
  if (magnitude < (exponents + 1) << 23U) {
    // Subnormal: a whole number of the smallest step. Adding 2^23 times the step rounds to one.
    const auto rounder = std::bit_cast<float>((exponents + 1 + shift) << 23U);
    return sign | static_cast<uint8_t>(std::bit_cast<uint32_t>(size + rounder) & 0xFFU);
  }
  magnitude += (1U << (shift - 1)) - 1 + (magnitude >> shift & 1U);
  return sign | static_cast<uint8_t>((magnitude >> shift) -
                                     (exponents << static_cast<uint32_t>(format.mantissa)));
}

constexpr float decode_float8(uint8_t code, Float8 kind) {
  const Float8Format format = format_of(kind);
  const auto mantissa = static_cast<uint32_t>(format.mantissa);
  const uint32_t sign = static_cast<uint32_t>(code >> 7U) << 31U;
  const uint32_t magnitude = code & 0x7FU;
  const uint32_t infinity = 0x7CU;  // of e5m2
  if (kind == Float8::e5m2 ? magnitude > infinity : magnitude == 0x7FU)
    return std::bit_cast<float>(sign | 0x7FC00000U);
  if (kind == Float8::e5m2 && magnitude == infinity)
    return std::bit_cast<float>(sign | 0x7F800000U);
  const auto exponents = static_cast<uint32_t>(127 - format.bias);
  if (magnitude >> mantissa == 0) {
    const auto step = std::bit_cast<float>((exponents + 1 - mantissa) << 23U);
    const float size = static_cast<float>(magnitude) * step;
    return sign != 0 ? -size : size;
  }
  return std::bit_cast<float>(sign | ((magnitude << (23 - mantissa)) + (exponents << 23U)));
}

}  // namespace lockstep::nn
