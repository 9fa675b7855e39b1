// SPDX-License-Identifier: Apache-2.0
// The values of block-wise dynamic quantization, and how the nearest is found: a table by the upper
// 16 bits of a magnitude, in which no cell has more than one border between two values. The CPU's
// and CUDA's kernels share it. Private: not installed.
#pragma once

#include <bit>
#include <cstdint>

namespace lockstep::codec {

struct DynamicMap {
  // Cells reach from 2^-23, below which all is zero, to 1.
  static constexpr uint32_t kFirst = 0x34000000, kLast = 0x3f800000;  // bits of a float32
  static constexpr uint32_t kCells = ((kLast - kFirst) >> 16) + 1;

  float values[256];  // of the codes, ascending
  int zero;           // the code of 0
  // Values count from zero upwards here: step k is the code zero + k, and, for values of either
  // sign, zero - k is its negative; only the last step, 1, has none.
  int last_negative;
  // Of the smallest magnitude in a cell the step, above 16 bits that, with the lower bits of a
  // magnitude, carry one more where it is past the border: see step().
  uint32_t cells[kCells];

  // `distance` of a magnitude: its bits, at least kFirst, less kFirst.
  static constexpr uint32_t distance(uint32_t bits) {
    return (bits > kFirst ? bits : kFirst) - kFirst;
  }
  static constexpr uint32_t step(const uint32_t* cells, uint32_t distance) {
    return (cells[distance >> 16] + (distance & 0xffff)) >> 16;
  }
};

// Each power of ten from 1e-6 to 1 has twice as many values as the one below, evenly spread in
// their upper nine tenths; with 0 and 1 that makes 256.
constexpr DynamicMap make_dynamic_map(bool with_negative) {
  constexpr double powers[] = {1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1};
  DynamicMap map{};
  float magnitudes[256] = {};
  int steps = 1;
  for (int i = 0; i < 7; ++i) {
    const int count = 1 << (with_negative ? i : i + 1);
    for (int j = 0; j < count; ++j) {
      magnitudes[steps++] = static_cast<float>(powers[i] * (0.1 + 0.9 * (j + 0.5) / count));
    }
  }
  magnitudes[steps++] = 1;

  map.zero = with_negative ? steps - 2 : 0;
  map.last_negative = map.zero;
  for (int k = 0; k < steps; ++k) map.values[map.zero + k] = magnitudes[k];
  for (int k = 1; k <= map.last_negative; ++k) map.values[map.zero - k] = -magnitudes[k];

  // The last bits that belong to step k and not to k + 1; what is as near to both belongs to k.
  uint32_t borders[256] = {};
  for (int k = 0; k + 1 < steps; ++k) {
    const double middle = (static_cast<double>(magnitudes[k]) + magnitudes[k + 1]) / 2;
    const auto nearest = static_cast<float>(middle);
    borders[k] = std::bit_cast<uint32_t>(nearest) - (nearest > middle ? 1 : 0);
  }
  borders[steps - 1] = ~uint32_t{0};
  uint32_t k = 0;
  for (uint32_t cell = 0; cell < DynamicMap::kCells; ++cell) {
    const uint32_t smallest = DynamicMap::kFirst + (cell << 16), largest = smallest + 0xffff;
    while (smallest > borders[k]) ++k;
    map.cells[cell] = k << 16;
    if (borders[k] >= largest) continue;
    map.cells[cell] += largest - borders[k];
    if (borders[k + 1] < largest) throw "a cell has two borders";  // does not compile
  }
  return map;
}

}  // namespace lockstep::codec
