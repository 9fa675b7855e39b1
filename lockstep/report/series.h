// SPDX-License-Identifier: Apache-2.0
// Columns of numbers over the steps of a run, of any length in bounded memory: many steps share a
// bucket, of which the extremes are kept.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

namespace lockstep::report {

inline constexpr double kNone = std::numeric_limits<double>::quiet_NaN();

class Series {
 public:
  // At most `rows` rows, an even number of at least 4.
  explicit Series(size_t columns = 0, size_t rows = 2048);

  // The next step, with a value for each column; kNone where there is none.
  void add(std::span<const double> values);

  // One row for each step, or two for each bucket: the least and the greatest value of each column,
  // in the order in which they came.
  std::vector<std::vector<double>> rows() const;

  int64_t count() const { return count_; }
  // Of all steps that have a value.
  double sum(size_t column) const { return totals_[column].sum; }
  double mean(size_t column) const;
  double last(size_t column) const { return totals_[column].last; }
  double min(size_t column) const { return totals_[column].min; }
  double max(size_t column) const { return totals_[column].max; }
  // About the median, from the buckets: the first steps of a run, which are slow, do not count for
  // more than their number.
  double typical(size_t column) const;

 private:
  struct Cell {
    float min = std::numeric_limits<float>::infinity(), max = -min;
    bool max_first = false;
  };
  struct Precise {  // the first and the last value, where a float has too few digits
    double first = kNone, last = kNone;
  };
  struct Total {
    double sum = 0, last = kNone, min = kNone, max = kNone;
    int64_t count = 0;
  };
  void merge();

  size_t columns_, most_;
  int64_t count_ = 0, per_bucket_ = 1, in_last_ = 0;
  std::vector<Cell> cells_;    // bucket by bucket
  std::vector<Precise> ends_;  // the same
  std::vector<Total> totals_;
};

}  // namespace lockstep::report
