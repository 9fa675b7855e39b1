// SPDX-License-Identifier: Apache-2.0
#include "lockstep/layout/placement.h"

#include <algorithm>
#include <set>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::layout {

Placement Placement::whole(std::string name, Shape shape,
                           std::vector<std::string> replicated_over) {
  auto slice = Box::whole(shape);
  return {std::move(name), std::move(shape), std::move(slice), std::move(replicated_over), {}};
}

Placement Placement::narrow(int64_t dim, Range local, const std::string& axis) const {
  const auto dims = static_cast<int64_t>(slice.ranges.size());
  if (dim < 0 || dim >= dims) {
    throw ConfigError(
        format("[placement] {}: dim {}, must be at least 0 and below {}", describe(), dim, dims));
  }
  const auto& range = slice.ranges[dim];
  if (local.begin < 0 || local.begin > local.end || local.end > range.size()) {
    throw ConfigError(format("[placement] {}: {}:{} of dim {} is outside its 0:{}", describe(),
                             local.begin, local.end, dim, range.size()));
  }
  Placement part = *this;
  part.slice.ranges[dim] = {range.begin + local.begin, range.begin + local.end};
  std::erase(part.replicated_over, axis);
  part.sharded_over.push_back(axis);
  part.validate();
  return part;
}

Shape Placement::local_shape() const {
  if (global_shape.empty()) return is_empty() ? Shape{0} : Shape{};
  Shape shape;
  for (const auto& range : slice.ranges) shape.push_back(range.size());
  return shape;
}

void Placement::validate() const {
  const auto require = [&](bool holds, const std::string& rule) {
    if (!holds) throw ConfigError(format("[placement] {}: {}", describe(), rule));
  };
  require(!name.empty(), "the tensor must have a name");
  require(std::all_of(global_shape.begin(), global_shape.end(), [](int64_t n) { return n >= 0; }),
          "sizes must be at least 0");
  const auto whole = Box::whole(global_shape);
  require(slice.ranges.size() == whole.ranges.size(),
          format("the slice has {} dimensions, must have {}", slice.ranges.size(),
                 whole.ranges.size()));
  for (size_t dim = 0; dim < whole.ranges.size(); ++dim) {
    const auto& range = slice.ranges[dim];
    require(0 <= range.begin && range.begin <= range.end && range.end <= whole.ranges[dim].end,
            format("{}:{} of dim {} must lie in 0:{}", range.begin, range.end, dim,
                   whole.ranges[dim].end));
  }
  std::set<std::string> seen;
  for (const auto* axes : {&replicated_over, &sharded_over}) {
    for (const auto& axis : *axes) {
      require(!axis.empty(), "an axis has no name");
      require(seen.insert(axis).second, format("axis {} is named twice", axis));
    }
  }
}

std::string Placement::describe() const {
  auto text = format("{} {}", name, layout::describe(global_shape));
  text += is_whole() ? " whole" : " " + slice.describe();
  const char* separator = " ";
  if (!sharded_over.empty()) {
    text += separator + format("sharded over {}", join(sharded_over));
    separator = ", ";
  }
  if (!replicated_over.empty()) {
    text += separator + format("replicated over {}", join(replicated_over));
  }
  return text;
}

}  // namespace lockstep::layout
