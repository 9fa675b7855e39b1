// SPDX-License-Identifier: Apache-2.0
#include "lockstep/report/series.h"

#include <algorithm>
#include <cmath>

namespace lockstep::report {

Series::Series(size_t columns, size_t rows)
    : columns_(columns), most_(rows / 2), totals_(columns) {}

void Series::add(std::span<const double> values) {
  if (in_last_ == per_bucket_ || cells_.empty()) {
    if (cells_.size() == 2 * most_ * columns_) merge();
    if (in_last_ == per_bucket_ || cells_.empty()) {
      cells_.resize(cells_.size() + columns_);
      ends_.resize(cells_.size());
      in_last_ = 0;
    }
  }
  Cell* const cells = &cells_[cells_.size() - columns_];
  Precise* const ends = &ends_[cells_.size() - columns_];
  for (size_t i = 0; i < columns_; ++i) {
    const double value = values[i];
    if (!std::isfinite(value)) continue;
    const auto rounded = static_cast<float>(value);
    Cell& cell = cells[i];
    if (rounded > cell.max) {
      cell.max = rounded;
      cell.max_first = false;
    }
    if (rounded < cell.min) {
      cell.max_first = cell.min <= cell.max;  // there was a greater one before
      cell.min = rounded;
    }
    if (std::isnan(ends[i].first)) ends[i].first = value;
    ends[i].last = value;
    Total& total = totals_[i];
    total.sum += value;
    ++total.count;
    total.last = value;
    total.min = std::fmin(total.min, value);
    total.max = std::fmax(total.max, value);
  }
  ++in_last_;
  ++count_;
}

// Two buckets become one.
void Series::merge() {
  const size_t buckets = cells_.size() / columns_;
  for (size_t bucket = 0; bucket < buckets / 2; ++bucket) {
    for (size_t i = 0; i < columns_; ++i) {
      const Cell a = cells_[2 * bucket * columns_ + i], b = cells_[(2 * bucket + 1) * columns_ + i];
      Cell merged{std::min(a.min, b.min), std::max(a.max, b.max), false};
      const bool min_in_a = a.min <= b.min, max_in_a = a.max >= b.max;
      merged.max_first = min_in_a == max_in_a ? (min_in_a ? a : b).max_first : max_in_a;
      cells_[bucket * columns_ + i] = merged;
      const Precise first = ends_[2 * bucket * columns_ + i],
                    last = ends_[(2 * bucket + 1) * columns_ + i];
      ends_[bucket * columns_ + i] = {std::isnan(first.first) ? last.first : first.first,
                                      std::isnan(last.last) ? first.last : last.last};
    }
  }
  cells_.resize(buckets / 2 * columns_);
  ends_.resize(cells_.size());
  per_bucket_ *= 2;
  in_last_ = per_bucket_;
}

std::vector<std::vector<double>> Series::rows() const {
  std::vector<std::vector<double>> rows;
  const size_t buckets = columns_ == 0 ? 0 : cells_.size() / columns_;
  // Where a bucket has one step, its values are exact.
  for (size_t bucket = 0; bucket < buckets; ++bucket) {
    std::vector<double> a(columns_, kNone), b(columns_, kNone);
    for (size_t i = 0; i < columns_; ++i) {
      const Cell& cell = cells_[bucket * columns_ + i];
      const Precise& ends = ends_[bucket * columns_ + i];
      if (cell.min > cell.max) continue;
      const auto precise = [&](float value) {
        if (value == static_cast<float>(ends.first)) return ends.first;
        return value == static_cast<float>(ends.last) ? ends.last : double{value};
      };
      a[i] = precise(cell.max_first ? cell.max : cell.min);
      b[i] = precise(cell.max_first ? cell.min : cell.max);
    }
    rows.push_back(std::move(a));
    if (per_bucket_ > 1) rows.push_back(std::move(b));
  }
  return rows;
}

double Series::mean(size_t column) const {
  const Total& total = totals_[column];
  return total.count == 0 ? kNone : total.sum / static_cast<double>(total.count);
}

double Series::typical(size_t column) const {
  std::vector<double> values;
  for (const auto& row : rows()) {
    if (!std::isnan(row[column])) values.push_back(row[column]);
  }
  if (values.empty()) return kNone;
  const auto middle = values.begin() + static_cast<ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace lockstep::report
