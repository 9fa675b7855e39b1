// SPDX-License-Identifier: Apache-2.0
#include "lockstep/checkpoint/cut_slices.h"

#include <ATen/ATen.h>

#include <string_view>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/memory/tensor_bytes.h"

namespace lockstep::checkpoint::detail {

void check_slice(const NamedSlice& slice) {
  slice.placement.validate();
  memory::dtype_of(slice.tensor, slice.placement.name);
  if (slice.tensor.sizes() == at::IntArrayRef(slice.placement.local_shape())) return;
  throw ConfigError(format("[checkpoint] {} is a tensor of ({}), must be ({})",
                           slice.placement.describe(), join(slice.tensor.sizes()),
                           join(slice.placement.local_shape())));
}

std::string parameter_of(const std::string& slice) {
  constexpr std::string_view kOptimizer = "optim.";
  if (!slice.starts_with(kOptimizer)) return slice;
  return slice.substr(kOptimizer.size(), slice.rfind('.') - kOptimizer.size());
}

at::Tensor part_of(at::Tensor tensor, const layout::Box& held, const layout::Box& box) {
  if (tensor.dim() == 0) return tensor;
  for (size_t dim = 0; dim < box.ranges.size(); ++dim) {
    tensor = tensor.narrow(static_cast<int64_t>(dim),
                           box.ranges[dim].begin - held.ranges[dim].begin, box.ranges[dim].size());
  }
  return tensor;
}

}  // namespace lockstep::checkpoint::detail
