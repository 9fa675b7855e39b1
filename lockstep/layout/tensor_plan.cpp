// SPDX-License-Identifier: Apache-2.0
#include "lockstep/layout/tensor_plan.h"

#include <fnmatch.h>

#include <numeric>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/layout/shard_math.h"

namespace lockstep::layout {

std::vector<int> match(const TensorPlan& plan, std::span<const std::string> modules) {
  std::vector<int> rules;
  for (const std::string& module : modules) {
    int found = -1;
    for (int i = 0; i < static_cast<int>(plan.size()); ++i) {
      const std::string& pattern = plan[static_cast<size_t>(i)].pattern;
      if (fnmatch(pattern.c_str(), module.c_str(), 0) != 0) continue;
      if (found >= 0) {
        throw ConfigError(
            format("[tensor] module '{}' is named by '{}' and by '{}', must be named once", module,
                   plan[static_cast<size_t>(found)].pattern, pattern));
      }
      found = i;
    }
    rules.push_back(found);
  }
  return rules;
}

void require_all_used(const TensorPlan& plan, const std::vector<bool>& used) {
  for (size_t i = 0; i < plan.size(); ++i) {
    if (used[i]) continue;
    throw ConfigError(
        format("[tensor] '{}' of the plan names no module of the model", plan[i].pattern));
  }
}

Shape TensorSplit::local_shape() const {
  Shape shape = global_shape;
  if (is_whole()) return shape;
  int64_t size = 0;
  for (const Range& range : ranges) size += range.size();
  shape[static_cast<size_t>(dim)] = size;
  return shape;
}

std::vector<TensorSplit::MappedBox> TensorSplit::pieces(const Box& local) const {
  if (is_whole()) return {{local, local}};
  const auto d = static_cast<size_t>(dim);
  std::vector<MappedBox> found;
  int64_t begin = 0;  // of the range, in the rank's tensor
  for (const Range& range : ranges) {
    const Range here = local.ranges[d].intersect({begin, begin + range.size()});
    if (!here.empty()) {
      MappedBox piece{local, local};
      piece.local.ranges[d] = here;
      piece.global.ranges[d] = {here.begin - begin + range.begin, here.end - begin + range.begin};
      found.push_back(std::move(piece));
    }
    begin += range.size();
  }
  return found;
}

TensorSplit split_of(const TensorRule& rule, std::string_view module, std::string_view parameter,
                     const Shape& shape, int ranks, int rank) {
  TensorSplit split{shape};
  const bool is_weight = parameter == "weight";
  const bool takes_parts = rule.style == TensorStyle::column || rule.style == TensorStyle::row;
  if (!takes_parts && !rule.parts.empty()) {
    throw ConfigError(format("[tensor] '{}' has parts {}, which are for styles column and row",
                             module, join(rule.parts)));
  }
  if (rule.style == TensorStyle::sequence || rule.style == TensorStyle::partial ||
      (rule.style == TensorStyle::row && !is_weight))
    return split;
  split.dim = rule.style == TensorStyle::row ? 1 : 0;
  if (shape.size() <= static_cast<size_t>(split.dim)) {
    throw ConfigError(
        format("[tensor] '{}' has a {} of {}, which has too few dimensions for its style", module,
               parameter, describe(shape)));
  }
  const int64_t size = shape[static_cast<size_t>(split.dim)];
  if (rule.style == TensorStyle::vocab) {
    if (size < ranks) {
      throw ConfigError(format("[tensor] '{}' has {} rows, must have one for each of {} ranks",
                               module, size, ranks));
    }
    split.ranges = {balanced_range(size, ranks, rank)};
    return split;
  }
  const std::vector<int64_t> parts = rule.parts.empty() ? std::vector{size} : rule.parts;
  const int64_t units = std::accumulate(parts.begin(), parts.end(), int64_t{0});
  if (units < 1 || size % units != 0) {
    throw ConfigError(
        format("[tensor] '{}' has {} {}, which parts {} must add up to, or to a divisor of", module,
               size, split.dim == 0 ? "outputs" : "inputs", join(parts)));
  }
  int64_t begin = 0;
  for (const int64_t part : parts) {
    if (part < 1 || part % ranks != 0) {
      throw ConfigError(format("[tensor] '{}' ({}) has a part of {}, must be divisible by {} ranks",
                               module, describe(shape), part, ranks));
    }
    const int64_t whole = part * (size / units), share = whole / ranks;
    split.ranges.push_back({begin + rank * share, begin + (rank + 1) * share});
    begin += whole;
  }
  return split;
}

}  // namespace lockstep::layout
