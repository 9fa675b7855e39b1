// SPDX-License-Identifier: Apache-2.0
#include "lockstep/layout/shard_math.h"

#include <algorithm>
#include <limits>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::layout {
namespace {

void require_part(const char* operation, int64_t total, int64_t parts, int64_t index) {
  if (total < 0 || parts < 1 || index < 0 || index >= parts) {
    throw ConfigError(format(
        "[{}] part {} of {} over {} parts: the total must be at least 0, the parts at least 1 "
        "and the part below their number",
        operation, index, total, parts));
  }
}

// Where a tensor lies in the row of all of them.
struct Extent {
  int64_t begin = 0, rows = 0, row_size = 0;
  int64_t end() const { return begin + rows * row_size; }
};

std::vector<Extent> lay_end_to_end(std::span<const Shape> shapes) {
  std::vector<Extent> extents;
  int64_t offset = 0;
  for (const auto& shape : shapes) {
    if (std::any_of(shape.begin(), shape.end(), [](int64_t size) { return size < 0; })) {
      throw ConfigError(format("[cut_rows] shape {} has a negative size", describe(shape)));
    }
    const int64_t rows = shape.empty() ? 1 : shape[0];
    const int64_t row_size = rows == 0 ? 0 : numel_of(shape) / rows;
    extents.push_back({offset, rows, row_size});
    offset = extents.back().end();
  }
  return extents;
}

// The border between rows that is nearest to `cut`, which lies below the end of the last extent.
int64_t nearest_border(const std::vector<Extent>& extents, int64_t cut) {
  // Extents without elements end where they begin, so the one found has the element at `cut`.
  const auto extent = std::partition_point(extents.begin(), extents.end(),
                                           [&](const Extent& each) { return each.end() <= cut; });
  const auto into_row = (cut - extent->begin) % extent->row_size;
  const auto before = cut - into_row;
  return into_row * 2 >= extent->row_size && into_row > 0 ? before + extent->row_size : before;
}

}  // namespace

Range ceiling_chunk(int64_t total, int64_t parts, int64_t index) {
  require_part("ceiling_chunk", total, parts, index);
  const int64_t chunk = total / parts + (total % parts != 0);
  // index * chunk could overflow where total is near the limit: no begin lies beyond total.
  const int64_t begin =
      chunk != 0 && index > total / chunk ? total : std::min(total, index * chunk);
  return {begin, begin + std::min(chunk, total - begin)};
}

Range balanced_range(int64_t total, int64_t parts, int64_t index) {
  require_part("balanced_range", total, parts, index);
  const int64_t base = total / parts, remainder = total % parts;
  const int64_t begin = index * base + std::min(index, remainder);
  return {begin, begin + base + (index < remainder ? 1 : 0)};
}

std::vector<std::vector<RowShard>> cut_rows(std::span<const Shape> shapes, int64_t parts) {
  require_part("cut_rows", 0, parts, 0);
  const auto extents = lay_end_to_end(shapes);
  const int64_t total = extents.empty() ? 0 : extents.back().end();

  std::vector<std::vector<RowShard>> shards(parts);
  size_t tensor = 0;
  int64_t begin = 0;
  for (int64_t part = 0; part < parts && total > 0; ++part) {
    const auto ideal = balanced_range(total, parts, part).end;
    const auto end = ideal == total ? total : nearest_border(extents, ideal);
    while (begin < end) {
      while (extents[tensor].end() <= begin) ++tensor;
      const auto& extent = extents[tensor];
      const auto stop = std::min(end, extent.end());
      shards[part].push_back(
          {static_cast<int64_t>(tensor),
           {(begin - extent.begin) / extent.row_size, (stop - extent.begin) / extent.row_size}});
      begin = stop;
    }
  }
  return shards;
}

std::array<int, 2> nearly_square(int n) {
  if (n < 1)
    throw ConfigError(format("[nearly_square] {} cannot be factored, must be at least 1", n));
  int small = 1;
  for (int factor = 1; factor <= n / factor; ++factor) {
    if (n % factor == 0) small = factor;
  }
  return {n / small, small};
}

std::array<int, 3> nearly_cubic(int n) {
  if (n < 1)
    throw ConfigError(format("[nearly_cubic] {} cannot be factored, must be at least 1", n));
  // Of all exact factorisations the one with the smallest sum: the sum is least where the factors
  // are equal.
  std::array<int, 3> best = {n, 1, 1};
  auto best_sum = std::numeric_limits<int64_t>::max();
  for (int small = 1; small <= n / small / small; ++small) {
    if (n % small != 0) continue;
    const auto [large, middle] = nearly_square(n / small);
    const auto sum = int64_t{large} + middle + small;
    if (middle >= small && sum < best_sum) {
      best = {large, middle, small};
      best_sum = sum;
    }
  }
  return best;
}

}  // namespace lockstep::layout
