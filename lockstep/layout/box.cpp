// SPDX-License-Identifier: Apache-2.0
#include "lockstep/layout/box.h"

#include <algorithm>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::layout {
namespace {

void require_same_dims(const Box& a, const Box& b) {
  if (a.ranges.size() != b.ranges.size()) {
    throw ConfigError(format("[box] {} and {} have {} and {} dimensions, must have the same number",
                             a.describe(), b.describe(), a.ranges.size(), b.ranges.size()));
  }
}

}  // namespace

int64_t numel_of(const Shape& shape) {
  int64_t numel = 1;
  for (const auto size : shape) numel *= size;
  return numel;
}

std::string describe(const Shape& shape) { return format("({})", join(shape)); }

Range Range::intersect(const Range& other) const {
  const auto first = std::max(begin, other.begin);
  return {first, std::max(first, std::min(end, other.end))};
}

Box Box::whole(const Shape& shape) {
  if (shape.empty()) return {{{0, 1}}};
  Box box;
  for (const auto size : shape) box.ranges.push_back({0, size});
  return box;
}

int64_t Box::numel() const {
  int64_t numel = 1;
  for (const auto& range : ranges) numel *= range.empty() ? 0 : range.size();
  return numel;
}

bool Box::contains(const Box& other) const {
  require_same_dims(*this, other);
  if (other.empty()) return true;
  for (size_t dim = 0; dim < ranges.size(); ++dim) {
    if (!ranges[dim].contains(other.ranges[dim])) return false;
  }
  return true;
}

Box Box::intersect(const Box& other) const {
  require_same_dims(*this, other);
  Box common;
  for (size_t dim = 0; dim < ranges.size(); ++dim) {
    common.ranges.push_back(ranges[dim].intersect(other.ranges[dim]));
  }
  return common;
}

std::string Box::describe() const {
  std::vector<std::string> parts;
  for (const auto& range : ranges) parts.push_back(format("{}:{}", range.begin, range.end));
  return format("[{}]", join(parts));
}

void for_each_run(const Box& part, const Box& from, const Box& to,
                  const std::function<void(const ContiguousRun&)>& function) {
  require_same_dims(part, from);
  require_same_dims(part, to);
  if (part.empty()) return;
  // Up to and with this dimension indices are counted; all that is behind it belongs to a run.
  size_t last = part.ranges.size();
  ContiguousRun run{.size = 1};
  while (last > 0) {
    --last;
    run.size *= part.ranges[last].size();
    if (part.ranges[last] != from.ranges[last] || part.ranges[last] != to.ranges[last]) break;
  }
  std::vector<int64_t> index;
  for (const auto& range : part.ranges) index.push_back(range.begin);
  const auto place = [&](const Box& box) {
    int64_t offset = 0;
    for (size_t dim = 0; dim < index.size(); ++dim) {
      offset = offset * box.ranges[dim].size() + index[dim] - box.ranges[dim].begin;
    }
    return offset;
  };
  while (true) {
    run.from = place(from);
    run.to = place(to);
    function(run);
    size_t dim = last;
    while (dim > 0 && ++index[dim - 1] == part.ranges[dim - 1].end) {
      index[dim - 1] = part.ranges[dim - 1].begin;
      --dim;
    }
    if (dim == 0) return;
  }
}

std::vector<Box> subtract(const std::vector<Box>& boxes, const Box& cut) {
  std::vector<Box> rest;
  for (const Box& from : boxes) {
    const Box common = from.intersect(cut);
    if (common.empty()) {
      rest.push_back(from);
      continue;
    }
    Box core = from;
    for (size_t dim = 0; dim < from.ranges.size(); ++dim) {
      const auto [begin, end] = core.ranges[dim];
      const auto [inner_begin, inner_end] = common.ranges[dim];
      for (const auto& range : {Range{begin, inner_begin}, Range{inner_end, end}}) {
        if (range.empty()) continue;
        rest.push_back(core);
        rest.back().ranges[dim] = range;
      }
      core.ranges[dim] = common.ranges[dim];
    }
  }
  return rest;
}

std::vector<Box> pieces(const Box& box, int64_t max_numel) {
  if (max_numel < 1)
    throw ConfigError(format("[pieces] {} elements, must be at least 1", max_numel));
  if (box.empty()) return {};
  // The first dimension whose rows, each with all that is behind it, are small enough to be
  // together in a piece.
  size_t cut = 0;
  int64_t row = box.numel();
  while (row > max_numel) row /= box.ranges[cut++].size();
  if (cut == 0) return {box};
  const size_t dim = cut - 1;
  const int64_t rows = std::max<int64_t>(1, max_numel / row);
  std::vector<Box> all;
  Box outer = box;  // one index of each dimension before `dim`
  for (size_t d = 0; d < dim; ++d) outer.ranges[d].end = outer.ranges[d].begin + 1;
  while (true) {
    const auto [begin, end] = box.ranges[dim];
    for (int64_t first = begin; first < end; first += rows) {
      all.push_back(outer);
      all.back().ranges[dim] = {first, std::min(first + rows, end)};
    }
    size_t d = dim;
    while (d > 0) {
      Range& range = outer.ranges[d - 1];
      range = range.end == box.ranges[d - 1].end
                  ? Range{box.ranges[d - 1].begin, box.ranges[d - 1].begin + 1}
                  : Range{range.end, range.end + 1};
      if (range.begin != box.ranges[d - 1].begin) break;
      --d;
    }
    if (d == 0) return all;
  }
}

}  // namespace lockstep::layout
