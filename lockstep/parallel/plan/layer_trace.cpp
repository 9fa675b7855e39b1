// SPDX-License-Identifier: Apache-2.0
#include "lockstep/parallel/plan/layer_trace.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <utility>

#include "lockstep/memory/counting/allocation_log.h"
#include "lockstep/parallel/pipeline/split_backward.h"

namespace lockstep::parallel::detail {
namespace {

using torch::autograd::Edge;
using torch::autograd::Engine;
using torch::autograd::Node;
using torch::autograd::variable_list;
using torch::autograd::impl::gradient_edge;

bool takes_gradient(const at::Tensor& tensor) { return tensor.defined() && tensor.requires_grad(); }

at::Tensor gradient_like(const PassedTensor& passed, c10::Device device) {
  return at::empty_strided(passed.sizes, passed.strides,
                           at::TensorOptions().dtype(passed.dtype).device(device))
      .zero_();
}

// Stands for the layer before: gradients of the inputs end here. The inputs are no leaves, so the
// layer may write over them.
struct LayerBefore : Node {
  variable_list apply(variable_list&&) override { return {}; }
};

// Stands for the layer after: gives the gradients of the outputs, which have no other reference.
struct LayerAfter : Node {
  LayerAfter(torch::autograd::edge_list edges, PassedTensors outputs, c10::Device device)
      : Node(std::move(edges)), outputs(std::move(outputs)), device(device) {}
  variable_list apply(variable_list&&) override {
    variable_list gradients;
    for (const PassedTensor& output : outputs) gradients.push_back(gradient_like(output, device));
    return gradients;
  }
  const PassedTensors outputs;
  const c10::Device device;
};

// The inputs, and how the graph ends behind them.
struct Entered {
  Tensors inputs;
  std::vector<Edge> entries;
};

Entered enter(const PassedTensors& inputs, c10::Device device) {
  Entered entered;
  const auto before = std::make_shared<LayerBefore>();
  for (const PassedTensor& input : inputs) {
    at::Tensor tensor = gradient_like(input, device);
    if (input.value.defined() && !tensor.is_meta()) tensor.copy_(input.value);
    if (input.needs_gradient) {
      torch::autograd::create_gradient_edge(tensor, before);
      entered.entries.push_back(gradient_edge(tensor));
    }
    entered.inputs.push_back(std::move(tensor));
  }
  return entered;
}

std::vector<std::optional<size_t>> blocks_of(const Tensors& tensors,
                                             const memory::AllocationLog& log) {
  std::vector<std::optional<size_t>> blocks;
  for (const at::Tensor& tensor : tensors) blocks.push_back(log.block_of(tensor));
  return blocks;
}

struct Ended {
  std::vector<Edge> roots;
  PassedTensors outputs;  // that take gradients
};

// Calls the layer. Of its outputs only the graph is left.
Ended run_forward(const TracedLayer& layer, Tensors x, std::vector<Edge>& entries,
                  const memory::AllocationLog& log, Trace& trace) {
  x = layer.forward(x);
  if (entries.empty()) {
    // As a stage does: the first half of a backward ends behind the first layer.
    for (at::Tensor& tensor : x) {
      if (!takes_gradient(tensor)) continue;
      tensor = tensor.view_as(tensor);
      entries.push_back(gradient_edge(tensor));
    }
  }
  if (layer.loss) x = {layer.loss(x)};
  trace.outputs = blocks_of(x, log);
  Ended ended;
  for (const at::Tensor& tensor : x) {
    if (!takes_gradient(tensor)) continue;
    ended.roots.push_back(gradient_edge(tensor));
    ended.outputs.push_back(PassedTensor::of(tensor));
  }
  return ended;
}

void run_backward(Ended ended, c10::Device device) {
  const auto after =
      std::make_shared<LayerAfter>(std::move(ended.roots), std::move(ended.outputs), device);
  const at::Tensor one = at::ones({});
  after->add_input_metadata(one);
  Engine::get_default_engine().execute({Edge(after, 0)}, {one}, /*keep_graph=*/false,
                                       /*create_graph=*/false, /*accumulate_grad=*/true, {});
}

}  // namespace

PassedTensor PassedTensor::of(const at::Tensor& tensor) {
  PassedTensor passed{.sizes = tensor.sizes().vec(),
                      .strides = tensor.strides().vec(),
                      .dtype = tensor.scalar_type(),
                      .needs_gradient = takes_gradient(tensor)};
  // Views with gaps, or of one element many times, would take another amount of memory.
  if (!tensor.is_non_overlapping_and_dense())
    passed.strides = at::empty(passed.sizes, at::kMeta).strides().vec();
  return passed;
}

int64_t PassedTensor::bytes() const {
  int64_t count = static_cast<int64_t>(c10::elementSize(dtype));
  for (const int64_t size : sizes) count *= size;
  return count;
}

ForwardTrace trace_forward(const TracedLayer& layer, const PassedTensors& inputs) {
  const c10::AutoGradMode grad(true);
  ForwardTrace result;
  Tensors outputs;
  {
    const memory::AllocationLog log;
    Entered entered = enter(inputs, layer.device);
    result.trace.inputs = blocks_of(entered.inputs, log);
    outputs = layer.forward(entered.inputs);
    result.trace.outputs = blocks_of(outputs, log);
    entered.inputs.clear();
    result.trace.events = log.events();
  }
  result.trace.forward_end = result.trace.events.size();
  for (const at::Tensor& tensor : outputs) {
    result.outputs.push_back(PassedTensor::of(tensor));
    if (!tensor.is_meta()) result.outputs.back().value = tensor.detach();
  }
  return result;
}

Trace trace_step(const TracedLayer& layer, const PassedTensors& inputs, BackwardParts parts) {
  const c10::AutoGradMode grad(true);
  Trace trace;
  const memory::AllocationLog log;
  Entered entered = enter(inputs, layer.device);
  trace.inputs = blocks_of(entered.inputs, log);
  Ended ended = run_forward(layer, std::move(entered.inputs), entered.entries, log, trace);
  trace.forward_end = log.size();
  if (ended.roots.empty()) {
    // Nothing to differentiate.
  } else if (parts == BackwardParts::whole) {
    entered.entries.clear();
    run_backward(std::move(ended), layer.device);
  } else {
    variable_list gradients;
    for (const PassedTensor& output : ended.outputs)
      gradients.push_back(gradient_like(output, layer.device));
    SplitBackward split(std::move(ended.roots), std::move(gradients), entered.entries);
    entered.entries.clear();
    split.take_input_gradients();
    trace.half_end = log.size();
    split.run_weights();
  }
  trace.events = log.events();
  return trace;
}

}  // namespace lockstep::parallel::detail
