// SPDX-License-Identifier: Apache-2.0
// Runs one layer by itself and notes what it allocates. Private: not installed.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "lockstep/parallel/pipeline/layer.h"
#include "lockstep/parallel/plan/trace_cost.h"

namespace lockstep::parallel::detail {

// A tensor that goes from one layer to the next.
struct PassedTensor {
  std::vector<int64_t> sizes = {}, strides = {};
  at::ScalarType dtype = at::kFloat;
  bool needs_gradient = false;
  at::Tensor value = {};  // undefined: zeros

  static PassedTensor of(const at::Tensor& tensor);
  int64_t bytes() const;
};
using PassedTensors = std::vector<PassedTensor>;

struct TracedLayer {
  LayerForward forward;
  std::function<at::Tensor(const Tensors&)> loss;  // of the last layer, where there is one
  c10::Device device = c10::Device(c10::kCPU);     // of the inputs
};

struct ForwardTrace {
  Trace trace;
  PassedTensors outputs;  // with values where the device has some
};
// Forward alone, with a graph that is dropped.
ForwardTrace trace_forward(const TracedLayer& layer, const PassedTensors& inputs);

enum class BackwardParts { whole, halves };
// Forward and backward. Adds to the gradients of parameters, or leaves some where there were none.
Trace trace_step(const TracedLayer& layer, const PassedTensors& inputs, BackwardParts parts);

}  // namespace lockstep::parallel::detail
