// Ranges of indices, and boxes of them: which part of a tensor is meant.
#pragma once

#include <cstdint>
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

}  // namespace lockstep::layout
