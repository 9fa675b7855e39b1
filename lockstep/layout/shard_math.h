// SPDX-License-Identifier: Apache-2.0
// How many go where: the arithmetic of cutting tensors, devices and lists into parts.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "lockstep/layout/box.h"

namespace lockstep::layout {

// Part `index` of `total` things in nearly equal ranges, the first ones taking the remainder: 10
// over 4 is 3, 3, 2, 2.
Range balanced_range(int64_t total, int64_t parts, int64_t index);

// Rows (indices of dimension 0) of one tensor of a list. A 0-d tensor has one row; rows of a 1-d
// tensor are its elements.
struct RowShard {
  int64_t tensor = 0;
  Range rows;

  bool operator==(const RowShard&) const = default;
};

// Lays the tensors end to end, cuts them into balanced ranges of elements, and moves every cut to
// the nearest border between rows (the later one of two that are as near), so that what a part has
// of a tensor is a box. Gives each part's shards, in tensor order and none of them empty: every
// element is in exactly one. Rows wider than a part's share leave parts empty.
std::vector<std::vector<RowShard>> cut_rows(std::span<const Shape> shapes, int64_t parts);

// Factors of n, as nearly equal as exact factors can be, in descending order: 6 = 3 x 2, 5 = 5 x 1,
// 12 = 3 x 2 x 2.
std::array<int, 2> nearly_square(int n);
std::array<int, 3> nearly_cubic(int n);

}  // namespace lockstep::layout
