// SPDX-License-Identifier: Apache-2.0
#include "lockstep/parallel/pipeline/stage.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/parallel/shard/sharded_model_state.h"

namespace lockstep::parallel::detail {
namespace {

using torch::autograd::Edge;
using torch::autograd::Engine;
using torch::autograd::impl::gradient_edge;

bool needs_gradient(const at::Tensor& tensor) { return tensor.defined() && tensor.requires_grad(); }

}  // namespace

PipelineOptions with_tied_layers(PipelineOptions options, const std::vector<Layer>& layers) {
  for (const Layer& layer : layers) {
    if (!layer.tied.empty()) options.tied.push_back(layer.tied);
  }
  return options;
}

std::optional<FullyShardOptions> sharding_of(const PipelineOptions& options) {
  const auto* given = std::get_if<FullyShardOptions>(&options.data);
  if (given == nullptr) return std::nullopt;
  FullyShardOptions shard = *given;
  if (shard.advanced.granularity != ShardGranularity::tensors) return shard;
  std::vector<std::string>& first = shard.advanced.first_tensors;
  for (const std::string& name : options.tied) {
    if (std::find(first.begin(), first.end(), name) == first.end()) first.push_back(name);
  }
  return shard;
}

// The one recipe. Each step works on what the one before leaves of the layers to this rank:
//   tensor      ranks of "tp" share matrices, so all that follows is of parts of them;
//   recompute   what is computed again includes the collectives of "tp";
//   shard       ranks of "dp" share those parts (or hold copies: DDP), gathered when they are used,
//               also by a layer that is computed again;
//   pipeline    the engine runs what has become of the layers as a stage of "pp".
Stage::Stage(std::span<const Layer> layers, const comm::Group& data, TensorParallel& tensor,
             const PipelineOptions& options) {
  const auto make = [&] {
    auto module = std::make_shared<StageModule>();
    module->layers = build_stage_layers(
        layers, *module, options.advanced.recompute,
        {.random = options.advanced.random, .store = options.advanced.store}, module->untied);
    tensor.apply(*module);
    return module;
  };
  const std::optional<FullyShardOptions> shard = sharding_of(options);
  if (!options.advanced.initializer) {
    module_ = make();
    if (shard) sharded_ = fully_shard(*module_, data, *shard);
  } else {
    auto deferred = parallel::deferred(make);
    MaterializeOptions values = *options.advanced.initializer;
    values.rule = tensor.for_parts(std::move(values.rule));
    if (shard) {
      sharded_ = fully_shard(deferred, data, *shard, values);
      module_ = deferred.model;
    } else {
      module_ = materialize(std::move(deferred), values);
    }
  }
  if (!shard) whole_.emplace(*module_, data, std::get<DdpOptions>(options.data));
}

Tensors Stage::forward(int microbatch, Tensors inputs, const Loss* loss) {
  Flight flight;
  const auto enter_at = [&](const Tensors& tensors) {
    for (const at::Tensor& tensor : tensors) {
      if (needs_gradient(tensor)) flight.entries.push_back(gradient_edge(tensor));
    }
  };
  const bool records = c10::GradMode::is_enabled();
  if (records) enter_at(inputs);
  flight.enters_at_inputs = !flight.entries.empty();
  Tensors x = inputs;
  for (const LayerForward& layer : module_->layers) {
    x = layer(x);
    if (!records || !flight.entries.empty()) continue;
    // Hooks that the user has put on the tensors lie below this place, and run in one half only.
    for (at::Tensor& tensor : x) {
      if (needs_gradient(tensor)) tensor = tensor.view_as(tensor);
    }
    enter_at(x);
  }
  if (loss != nullptr) {
    x = {(*loss)(x)};
    if (!x[0].defined() || x[0].numel() != 1) {
      throw ConfigError(format("[pipeline] the loss of micro-batch {} has {} elements, must have 1",
                               microbatch, x[0].defined() ? x[0].numel() : 0));
    }
  }
  if (!records) return x;
  if (loss != nullptr) flight.loss_gradient = at::ones_like(x[0]);
  for (const at::Tensor& tensor : x)
    flight.outputs.push_back(needs_gradient(tensor) ? gradient_edge(tensor) : Edge());
  flight.inputs = std::move(inputs);
  flights_[microbatch] = std::move(flight);
  return x;
}

std::pair<Stage::Edges, Tensors> Stage::begin_backward(const Flight& flight,
                                                       const Tensors& gradients) const {
  Edges roots;
  Tensors given;
  for (size_t i = 0; i < flight.outputs.size(); ++i) {
    const Edge& edge = flight.outputs[i];
    if (!edge.is_valid()) continue;
    const at::Tensor& gradient =
        flight.loss_gradient.defined() ? flight.loss_gradient : gradients.at(i);
    if (!gradient.defined()) continue;
    roots.push_back(edge);
    given.push_back(gradient);
  }
  return {std::move(roots), std::move(given)};
}

Stage::NoSyncGuard Stage::synchronised(int microbatch, bool syncs) {
  if (whole_) whole_->set_micro_batch(first_microbatch_ + microbatch);
  if (sharded_) sharded_->set_micro_batch(first_microbatch_ + microbatch);
  if (syncs) {
    reduced_ = true;
    return {};
  }
  if (whole_) return whole_->no_sync();
  return sharded_->no_sync();
}

Tensors Stage::backward(int microbatch, const Tensors& gradients, bool syncs) {
  const NoSyncGuard guard = synchronised(microbatch, syncs);
  Flight flight = std::move(flights_.extract(microbatch).mapped());
  const auto [roots, given] = begin_backward(flight, gradients);
  flight.outputs.clear();
  flight.entries.clear();
  if (!roots.empty()) {
    Engine::get_default_engine().execute(roots, given, /*keep_graph=*/false,
                                         /*create_graph=*/false, /*accumulate_grad=*/true, {});
  } else if (syncs) {
    reduced_ = false;  // nothing came that could have
  }
  Tensors arrived;
  for (const at::Tensor& input : flight.inputs)
    arrived.push_back(needs_gradient(input) ? input.grad() : at::Tensor());
  return arrived;
}

void Stage::backward_by(int microbatch, bool syncs, const std::function<void()>& run) {
  const NoSyncGuard guard = synchronised(microbatch, syncs);
  run();
}

Tensors Stage::backward_input(int microbatch, const Tensors& gradients) {
  Flight& flight = flights_.at(microbatch);
  auto [roots, given] = begin_backward(flight, gradients);
  const Edges entries = std::exchange(flight.entries, {});
  flight.outputs.clear();
  flight.split.emplace(std::move(roots), std::move(given), entries);
  kept_bytes_ += flight.split->kept_bytes();
  Tensors arrived;
  if (flight.enters_at_inputs) {
    Tensors found = flight.split->take_input_gradients();
    size_t next = 0;
    for (const at::Tensor& input : flight.inputs)
      arrived.push_back(needs_gradient(input) ? std::move(found[next++]) : at::Tensor());
  }
  flight.inputs.clear();
  return arrived;
}

void Stage::backward_weight(int microbatch, bool syncs) {
  const NoSyncGuard guard = synchronised(microbatch, syncs);
  Flight flight = std::move(flights_.extract(microbatch).mapped());
  SplitBackward& split = flight.split.value();
  kept_bytes_ -= split.kept_bytes();
  if (!split.run_weights() && syncs) reduced_ = false;
}

void Stage::begin_step() {
  reduced_ = false;
  if (whole_) whole_->before_forward();
}

void Stage::unshard() {
  if (sharded_ && sharded_->shared()->engine) sharded_->shared()->engine->pin("", /*waits=*/false);
}

void Stage::reshard() {
  if (sharded_) sharded_->reshard();
}

void Stage::reduce() {
  if (std::exchange(reduced_, true)) return;
  if (whole_) whole_->reduce_gradients();
  if (sharded_) sharded_->reduce_gradients();
}

std::vector<optim::NamedParameter> Stage::named_parameters() const {
  return sharded_ ? sharded_->named_parameters() : optim::named_parameters(*module_);
}

std::vector<optim::NamedParameter> Stage::norm_parameters() const {
  return sharded_ ? sharded_->norm_parameters() : optim::named_parameters(*module_);
}

}  // namespace lockstep::parallel::detail
