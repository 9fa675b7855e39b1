#include "lockstep/layout/box.h"

#include <algorithm>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::layout {
namespace {

void require_same_dims(const Box& a, const Box& b) {
  if (a.ranges.size() != b.ranges.size()) {
    throw ConfigError(format("[box] {} and {} have {} and {} dimensions, must have as many",
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

}  // namespace lockstep::layout
