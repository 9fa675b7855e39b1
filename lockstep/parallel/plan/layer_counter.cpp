// SPDX-License-Identifier: Apache-2.0
#include "lockstep/parallel/plan/layer_counter.h"

#include <ATen/ATen.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <memory>
#include <sstream>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/memory/counting/allocation_log.h"
#include "lockstep/memory/meter.h"
#include "lockstep/parallel/recompute/recompute.h"

namespace lockstep::parallel::detail {
namespace {

// Every parameter and buffer of a module, once.
struct ModuleTensors {
  explicit ModuleTensors(const torch::nn::Module& module) {
    std::set<const c10::TensorImpl*> seen;
    const auto add = [&](const auto& items, std::vector<NamedTensor>& list) {
      for (const auto& item : items) {
        if (item.value().defined() && seen.insert(item.value().unsafeGetTensorImpl()).second)
          list.push_back({item.key(), item.value()});
      }
    };
    add(module.named_parameters(), parameters);
    add(module.named_buffers(), buffers);
  }
  std::vector<at::Tensor> all() const {
    std::vector<at::Tensor> tensors;
    for (const auto* list : {&parameters, &buffers}) {
      for (const NamedTensor& named : *list) tensors.push_back(named.tensor);
    }
    return tensors;
  }

  std::vector<NamedTensor> parameters, buffers;
};

// A layer by itself.
struct BuiltLayer {
  std::shared_ptr<torch::nn::Module> root;
  LayerForward forward;
  bool existed = false;  // its tensors were made before
};

BuiltLayer build_alone(const Layer& layer, size_t index, TensorParallel& tensor) {
  BuiltLayer built;
  built.root = std::make_shared<torch::nn::Module>("layer");
  {
    const memory::AllocationLog log;
    built.forward = layer.build(*built.root);
    for (const at::Tensor& each : ModuleTensors(*built.root).all()) {
      if (each.is_cpu() && each.nbytes() > 0 && !log.block_of(each)) built.existed = true;
    }
  }
  for (const at::Tensor& each : ModuleTensors(*built.root).all()) {
    if (each.is_cpu()) continue;
    throw ConfigError(
        format("[memory_of] layer {} has tensors on {}, must build them on the CPU: layers are "
               "counted there",
               index, each.device().str()));
  }
  if (built.existed && tensor.group().size() > 1) {
    throw ConfigError(
        format("[memory_of] layer {} gives a module that was made before, must make one when it "
               "is built: tensor parallelism would leave a part of it",
               index));
  }
  tensor.apply(*built.root);
  return built;
}

// While it lives, the module's tensors are on the meta device.
class OnMeta {
 public:
  explicit OnMeta(const torch::nn::Module& module) {
    for (const at::Tensor& tensor : ModuleTensors(module).all()) {
      real_.emplace_back(tensor, tensor.detach());
      give_memory(tensor, at::empty_strided(tensor.sizes(), tensor.strides(),
                                            tensor.options().device(at::kMeta)));
    }
  }
  ~OnMeta() {
    for (const auto& [tensor, real] : real_) {
      tensor.mutable_grad().reset();
      give_memory(tensor, real);
    }
  }
  OnMeta(const OnMeta&) = delete;
  OnMeta& operator=(const OnMeta&) = delete;

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> real_;
};

// Gradients and buffers are afterwards as they were before.
class SameState {
 public:
  explicit SameState(const torch::nn::Module& module) {
    const ModuleTensors tensors(module);
    for (const NamedTensor& parameter : tensors.parameters) {
      gradients_.emplace_back(parameter.tensor, parameter.tensor.grad());
      parameter.tensor.mutable_grad().reset();
    }
    for (const NamedTensor& buffer : tensors.buffers)
      buffers_.emplace_back(buffer.tensor, buffer.tensor.clone());
  }
  ~SameState() {
    const at::NoGradGuard no_grad;
    for (auto& [parameter, gradient] : gradients_) parameter.mutable_grad() = gradient;
    for (const auto& [buffer, value] : buffers_) buffer.copy_(value);
  }
  SameState(const SameState&) = delete;
  SameState& operator=(const SameState&) = delete;

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> gradients_, buffers_;
};

// ByType refuses a module that has none of the types; one layer may have none.
UnitPolicy for_one_layer(const UnitPolicy& policy) {
  const auto* types = std::get_if<ByType>(&policy);
  if (types == nullptr) return policy;
  return ByPredicate([names = types->names](const std::string&, torch::nn::Module& module) {
    return std::ranges::any_of(
        names, [&](const std::string& name) { return is_called(module.name(), name); });
  });
}

at::Tensor shape_of(const at::Tensor& tensor) {
  at::Tensor shape = at::empty(tensor.sizes(), tensor.options().device(at::kMeta));
  return shape.set_requires_grad(tensor.requires_grad());
}

}  // namespace

std::string signature(const torch::nn::Module& root, const std::vector<PassedTensors>& inputs) {
  std::ostringstream text;
  // By itself each: the names that lead to a layer are its own.
  for (const auto& module : root.modules()) {
    module->pretty_print(text);
    text << '\n';
  }
  for (const at::Tensor& tensor : ModuleTensors(root).all()) {
    text << tensor.sizes() << tensor.scalar_type() << tensor.requires_grad() << '\n';
  }
  for (const PassedTensors& each : inputs) {
    for (const PassedTensor& input : each)
      text << at::IntArrayRef(input.sizes) << at::IntArrayRef(input.strides) << input.dtype
           << input.needs_gradient << '\n';
  }
  return text.str();
}

LayerCounter::LayerCounter(const CountOptions& options, comm::Group group)
    : options_(options),
      tensor_(
          std::move(group), options.pipeline.plan,
          {.sequence_parallel = options.pipeline.advanced.sequence_parallel, .broadcast = false}) {
  memory::Meter::install();
}

CountedLayer LayerCounter::count(const Layer& layer, size_t index, bool is_last,
                                 const std::vector<PassedTensors>& inputs) {
  BuiltLayer built = build_alone(layer, index, tensor_);
  CountedLayer counted;
  const ModuleTensors tensors(*built.root);
  counted.name = format("layer {}", index);
  if (!tensors.parameters.empty()) {
    const std::string& first = tensors.parameters[0].name;
    counted.name = first.substr(0, first.rfind('.'));
  }
  const auto* shard = std::get_if<FullyShardOptions>(&options_.pipeline.data);
  counted.units =
      plan_units(*built.root, shard == nullptr ? OneUnit{} : for_one_layer(shard->units));
  for (const NamedTensor& buffer : tensors.buffers)
    counted.buffers += static_cast<int64_t>(buffer.tensor.nbytes());
  const PipelineAdvancedOptions& how = options_.pipeline.advanced;
  const TracedLayer traced{
      .forward = layer.recompute
                     ? recomputed(built.forward, layer.own_recompute.value_or(how.recompute),
                                  {.random = how.random})
                     : built.forward,
      .loss = is_last ? options_.how.loss : nullptr};
  run(counted, *built.root, built.existed, traced, inputs);
  for (const NamedTensor& parameter : tensors.parameters)
    counted.parameters.push_back({parameter.name, shape_of(parameter.tensor)});
  for (const size_t place : counted.sparse_places)
    counted.sparse.insert(counted.parameters[place].name);
  for (UnitPlan& unit : counted.units) {
    for (auto& parameter : unit.parameters) parameter.tensor = shape_of(parameter.tensor);
  }
  return counted;
}

// Recurrent modules go another way on the meta device: there is no kernel for a whole layer of
// them.
static bool goes_another_way_on_meta(const torch::nn::Module& root) {
  for (const auto& module : root.modules(/*include_self=*/false)) {
    const std::string name = module->name();
    for (const char* kind : {"LSTM", "GRU", "RNN"}) {
      if (name.find(kind) != std::string::npos) return true;
    }
  }
  return false;
}

void LayerCounter::run(CountedLayer& counted, const torch::nn::Module& root, bool existed,
                       TracedLayer layer, const std::vector<PassedTensors>& inputs) {
  const bool alone = tensor_.group().size() == 1;
  if (alone && !existed && !goes_another_way_on_meta(root)) {
    try {
      const OnMeta meta(root);
      layer.device = at::kMeta;
      run_on(counted, root, layer, inputs);
      counted.on_meta = true;
      return;
    } catch (const std::exception&) {
      // An operator that must have values, or that torch does not know there.
    }
  }
  layer.device = at::kCPU;
  const SameState state(root);
  run_on(counted, root, layer, inputs);
}

void LayerCounter::run_on(CountedLayer& counted, const torch::nn::Module& root,
                          const TracedLayer& layer, const std::vector<PassedTensors>& inputs) {
  counted.traces.clear();
  counted.forwards.clear();
  counted.outputs.clear();
  for (const PassedTensors& each : inputs) {
    ForwardTrace forward = trace_forward(layer, each);
    counted.forwards.push_back(std::move(forward.trace));
    counted.outputs.push_back(std::move(forward.outputs));
  }
  // Layers that are alike to look at, and whose forwards allocate the same, are alike. Not with
  // several ranks, which would have to agree on it.
  const bool may_be_alike =
      tensor_.group().size() == 1 && !layer.loss && !ModuleTensors(root).parameters.empty();
  const std::string looks = may_be_alike ? layer.device.str() + signature(root, inputs) : "";
  if (const auto found = seen_.find(looks);
      may_be_alike && found != seen_.end() && found->second.forwards == counted.forwards) {
    counted.traces = found->second.traces;
    counted.sparse_places = found->second.sparse_places;
    return;
  }
  const std::vector<NamedTensor> parameters = ModuleTensors(root).parameters;
  for (const PassedTensors& each : inputs) {
    const auto keeping = [&](BackwardParts parts) {
      for (const NamedTensor& parameter : parameters) parameter.tensor.mutable_grad().reset();
      return trace_step(layer, each, parts);
    };
    LayerTraces traces;
    if (options_.halves) {
      traces.split_keeping = keeping(BackwardParts::halves);
      traces.split_adding = trace_step(layer, each, BackwardParts::halves);
    }
    traces.keeping = keeping(BackwardParts::whole);
    for (size_t i = 0; i < parameters.size(); ++i) {
      const at::Tensor& gradient = parameters[i].tensor.grad();
      if (gradient.defined() && gradient.layout() != at::kStrided) counted.sparse_places.insert(i);
    }
    traces.adding = trace_step(layer, each, BackwardParts::whole);
    counted.traces.push_back(std::move(traces));
  }
  for (const NamedTensor& parameter : parameters) parameter.tensor.mutable_grad().reset();
  if (may_be_alike) seen_[looks] = counted;
}

}  // namespace lockstep::parallel::detail
