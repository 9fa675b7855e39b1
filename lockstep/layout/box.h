// SPDX-License-Identifier: Apache-2.0
// Ranges of indices, and boxes of them: which part of a tensor is meant.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace lockstep::layout {

using Shape = std::vector<int64_t>;

// Product of the sizes; 1 for a 0-d tensor.
int64_t numel_of(const Shape& shape);
std::string describe(const Shape& shape);  // "(4, 6)"

// Indices begin, begin + 1, ... end - 1.
struct Range {
  int64_t begin = 0, end = 0;

  int64_t size() const { return end - begin; }
  bool empty() const { return end <= begin; }
  bool contains(const Range& other) const {
    return other.empty() || (begin <= other.begin && other.end <= end);
  }
  // Empty, but never reversed, where the two do not meet.
  Range intersect(const Range& other) const;

  bool operator==(const Range&) const = default;
};

// Part `index` of `total` things in chunks of ceil(total / parts): 10 over 4 is 3, 3, 3, 1. Late
// parts may be empty.
Range ceiling_chunk(int64_t total, int64_t parts, int64_t index);

// One range per dimension. A 0-d tensor counts as one row: its box has one range, [0, 1) or, where
// nothing of it is meant, [0, 0).
struct Box {
  std::vector<Range> ranges;

  static Box whole(const Shape& shape);

  int64_t numel() const;
  bool empty() const { return numel() == 0; }
  // An empty box is inside every box of as many dimensions.
  bool contains(const Box& other) const;
  Box intersect(const Box& other) const;
  std::string describe() const;  // "[0:4, 2:6]"

  bool operator==(const Box&) const = default;
};

// Elements that lie next to each other in two row-major arrays.
struct ContiguousRun {
  int64_t from = 0, to = 0;  // their places in each
  int64_t size = 0;
};

// Calls the function with the runs of `part`, in order, as long as they can be: `from` and `to` are
// the boxes that the two arrays hold, and contain it.
void for_each_run(const Box& part, const Box& from, const Box& to,
                  const std::function<void(const ContiguousRun&)>& function);

// What is left of the boxes without `cut`: of each, two boxes at most for each dimension.
std::vector<Box> subtract(const std::vector<Box>& boxes, const Box& cut);

// The box, cut into boxes of at most `max_numel` elements (at least 1), each a run of its
// row-major array, in order. None where it is empty.
std::vector<Box> pieces(const Box& box, int64_t max_numel);

}  // namespace lockstep::layout
