// SPDX-License-Identifier: Apache-2.0
#include "lockstep/optim/parameters/placed_runs.h"

#include <algorithm>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::optim::detail {
namespace {

// Runs of equal length and distance become one entry.
void add_part(const PlacedPart& part, std::vector<PlacedRuns>& all) {
  const layout::Placement& placed = part.placement;
  const size_t before = all.size();
  layout::for_each_run(
      placed.slice, placed.slice, layout::Box::whole(placed.global_shape),
      [&](const layout::ContiguousRun& run) {
        if (all.size() > before) {
          PlacedRuns& last = all.back();
          const int64_t runs = last.count / last.length;
          if (runs == 1) last.stride = run.to - last.first;
          if (run.size == last.length && run.to == last.first + runs * last.stride) {
            last.count += run.size;
            return;
          }
        }
        all.push_back({placed.name, part.begin + run.from, run.size, run.to, run.size, 0});
      });
}

}  // namespace

std::vector<PlacedRuns> placed_runs(const NamedParameter& parameter) {
  const int64_t elements = parameter.tensor.numel();
  if (elements == 0) return {};
  if (parameter.parts.empty()) return {{parameter.name, 0, elements, 0, elements, 0}};
  std::vector<PlacedRuns> all;
  for (const PlacedPart& part : parameter.parts) {
    part.placement.validate();
    if (part.begin < 0 || part.begin + part.placement.numel() > elements) {
      throw ConfigError(format("[placed_runs] {} from element {} on must lie in '{}', which has {}",
                               part.placement.describe(), part.begin, parameter.name, elements));
    }
    if (!part.placement.is_empty()) add_part(part, all);
  }
  std::ranges::sort(all, {}, &PlacedRuns::begin);
  return all;
}

}  // namespace lockstep::optim::detail
