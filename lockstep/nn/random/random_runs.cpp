// SPDX-License-Identifier: Apache-2.0
#include "lockstep/nn/random/random_runs.h"

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::nn {
namespace {

void validate(const Slice& slice, const layout::Shape& sizes, std::string_view operation) {
  const auto whole = layout::Box::whole(slice.shape);
  const bool same_dims = slice.box.ranges.size() == whole.ranges.size();
  if (!same_dims || !whole.contains(slice.box)) {
    throw ConfigError(format("[{}] slice {} must lie in a tensor of {}", operation,
                             slice.box.describe(), layout::describe(slice.shape)));
  }
  layout::Shape held;
  for (const auto& range : slice.box.ranges) held.push_back(std::max<int64_t>(0, range.size()));
  const bool same_sizes = slice.shape.empty() && sizes.empty() ? held[0] == 1 : held == sizes;
  if (!same_sizes) {
    throw ConfigError(format("[{}] a tensor of {} does not hold slice {}, must be {}", operation,
                             layout::describe(sizes), slice.box.describe(),
                             layout::describe(held)));
  }
}

}  // namespace

Runs runs_of(const layout::Shape& sizes, const std::optional<Slice>& slice,
             std::string_view operation) {
  Runs runs{.length = layout::numel_of(sizes)};
  if (!slice) return runs;
  validate(*slice, sizes, operation);
  if (runs.length == 0) return runs;

  // From the innermost dimension out: all that is neighbours becomes one run, and dimensions whose
  // runs follow each other at one distance become one.
  runs.length = 1;
  int64_t stride = 1;
  for (auto dim = slice->box.ranges.size(); dim-- > 0;) {
    const auto& range = slice->box.ranges[dim];
    runs.first += range.begin * stride;
    int& n = runs.num_dims;
    if (n == 0 && runs.length == stride) {
      runs.length *= range.size();
    } else if (range.size() > 1) {
      runs.count *= range.size();
      if (n > 0 && stride == runs.sizes[n - 1] * runs.strides[n - 1]) {
        runs.sizes[n - 1] *= range.size();
      } else if (n == Runs::kMaxDims) {
        throw ConfigError(format("[{}] slice {} is cut in more than {} dimensions", operation,
                                 slice->box.describe(), Runs::kMaxDims));
      } else {
        runs.sizes[n] = range.size();
        runs.strides[n++] = stride;
      }
    }
    stride *= slice->shape.empty() ? 1 : slice->shape[dim];
  }
  return runs;
}

const CpuKernels& cpu_kernels() {
#ifdef __x86_64__
  static const bool has_v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (has_v3) return x86_v3::kKernels;
#endif
  return baseline::kKernels;
}

}  // namespace lockstep::nn
