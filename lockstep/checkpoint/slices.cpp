// SPDX-License-Identifier: Apache-2.0
#include "lockstep/checkpoint/slices.h"

#include <torch/nn/module.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <set>
#include <span>
#include <string>
#include <utility>

#include "lockstep/checkpoint/cut_slices.h"
#include "lockstep/checkpoint/torch_optimizer.h"
#include "lockstep/optim/gradient_passes.h"
#include "lockstep/parallel/shard/sharded_model_state.h"

namespace lockstep::checkpoint {
namespace {

NamedSlice whole(const std::string& name, const at::Tensor& tensor) {
  return {layout::Placement::whole(name, tensor.sizes().vec()), tensor.detach()};
}

constexpr std::string_view kOptimizer = "optim.";

using detail::StateTensor;

std::vector<StateTensor> state_of(optim::Optimizer& optimizer) {
  std::vector<StateTensor> all;
  auto* const staged = dynamic_cast<optim::StagedState*>(&optimizer);
  if (staged == nullptr) {
    for (const auto& [name, tensor] : optimizer.state()) all.push_back({name, tensor});
    return all;
  }
  for (const auto& [name, tensor] : staged->lazy_state()) {
    all.push_back({name, tensor, [staged, name = name] { staged->refresh(name); },
                   [staged, name = name] { staged->adopt(name); }});
  }
  return all;
}

std::vector<NamedSlice> whole_state(const std::vector<StateTensor>& state) {
  std::vector<NamedSlice> slices;
  for (const StateTensor& entry : state) {
    slices.push_back(whole(std::string(kOptimizer) + entry.name, entry.tensor));
    slices.back().saving = entry.saving;
    slices.back().loaded = entry.loaded;
  }
  return slices;
}

// Parts of a tensor of the optimizer's, such as "layer.weight.exp_avg".
void add_parts(const parallel::ShardedModel& model, const StateTensor& entry,
               std::vector<NamedSlice>& slices) {
  const size_t dot = entry.name.rfind('.');
  for (auto& [placement, part] : model.parts_of(entry.name.substr(0, dot), entry.tensor)) {
    if (placement.is_empty()) continue;
    placement.name = std::string(kOptimizer) + placement.name + entry.name.substr(dot);
    slices.push_back({placement, part, entry.saving, entry.loaded});
  }
}

std::vector<NamedSlice> sharded_state(const parallel::ShardedModel& model,
                                      const std::vector<StateTensor>& state) {
  std::vector<NamedSlice> slices;
  for (const StateTensor& entry : state) add_parts(model, entry, slices);
  return slices;
}

std::vector<NamedSlice> pipelined_state(const parallel::Pipeline& pipeline,
                                        const std::vector<StateTensor>& state) {
  const auto sharded = pipeline.sharded();
  if (sharded.empty()) return of_whole_model(whole_state(state), pipeline.tensor());
  // Which stage a tensor of the optimizer's belongs to; of tied ones it has the first.
  std::map<std::string, size_t> stage_of;
  for (size_t stage = 0; stage < sharded.size(); ++stage) {
    for (const auto& parameter : sharded[stage].named_parameters())
      stage_of.emplace(parameter.name, stage);
  }
  std::vector<NamedSlice> slices;
  for (const StateTensor& entry : state)
    add_parts(sharded[stage_of.at(entry.name.substr(0, entry.name.rfind('.')))], entry, slices);
  return of_whole_model(slices, pipeline.tensor());
}

// The slices of a model and of its optimizer.
std::vector<NamedSlice> joined(std::vector<NamedSlice> model, std::vector<NamedSlice> optimizer) {
  std::move(optimizer.begin(), optimizer.end(), std::back_inserter(model));
  return model;
}

}  // namespace

void open_to_read(const at::Tensor& tensor) { optim::announce_read(tensor); }

std::vector<NamedSlice> slices_of(const torch::nn::Module& model) {
  std::vector<NamedSlice> slices;
  std::set<const c10::TensorImpl*> seen;
  const auto add = [&](const auto& items) {
    for (const auto& item : items) {
      // Layers without statistics register buffers that are undefined.
      if (!item.value().defined() || !seen.insert(item.value().unsafeGetTensorImpl()).second)
        continue;
      slices.push_back(whole(item.key(), item.value()));
    }
  };
  add(model.named_parameters());
  const size_t parameters = slices.size();
  add(model.named_buffers());
  for (size_t i = parameters; i < slices.size(); ++i) slices[i].of_first_rank = true;
  return slices;
}

std::vector<NamedSlice> slices_of(optim::Optimizer& optimizer) {
  return whole_state(state_of(optimizer));
}

std::vector<NamedSlice> slices_of(const torch::nn::Module& model,
                                  torch::optim::Optimizer& optimizer) {
  return whole_state(detail::state_of(optimizer, optim::named_parameters(model)));
}

std::vector<NamedSlice> slices_of(const parallel::ShardedModel& model) {
  std::vector<NamedSlice> slices;
  for (auto& [placement, tensor] : model.sharded_state_dict())
    slices.push_back({.placement = placement, .tensor = tensor, .model = model});
  const auto buffers = model.shared()->model->named_buffers();
  for (NamedSlice& slice : slices) slice.of_first_rank = buffers.contains(slice.placement.name);
  return slices;
}

std::vector<NamedSlice> slices_of(const parallel::ShardedModel& model,
                                  optim::Optimizer& optimizer) {
  return sharded_state(model, state_of(optimizer));
}

std::vector<NamedSlice> slices_of(const parallel::ShardedModel& model,
                                  torch::optim::Optimizer& optimizer) {
  return sharded_state(model, detail::state_of(optimizer, model.named_parameters()));
}

std::vector<NamedSlice> slices_of(const parallel::Pipeline& pipeline) {
  std::vector<NamedSlice> slices;
  const auto modules = pipeline.modules();
  const auto sharded = pipeline.sharded();
  for (size_t stage = 0; stage < modules.size(); ++stage) {
    const auto copies = pipeline.tied_copies(stage);
    const auto mine = sharded.empty() ? slices_of(*modules[stage]) : slices_of(sharded[stage]);
    for (const NamedSlice& slice : mine) {
      if (std::find(copies.begin(), copies.end(), slice.placement.name) == copies.end())
        slices.push_back(slice);
    }
  }
  return of_whole_model(slices, pipeline.tensor());
}

std::vector<NamedSlice> slices_of(const parallel::Pipeline& pipeline, optim::Optimizer& optimizer) {
  return pipelined_state(pipeline, state_of(optimizer));
}

std::vector<NamedSlice> slices_of(const parallel::Pipeline& pipeline,
                                  torch::optim::Optimizer& optimizer) {
  return pipelined_state(pipeline, detail::state_of(optimizer, pipeline.named_parameters()));
}

std::vector<NamedSlice> of_whole_model(const std::vector<NamedSlice>& slices,
                                       const parallel::TensorParallel& tensor) {
  std::vector<NamedSlice> all;
  for (const NamedSlice& slice : slices) {
    const layout::Placement& held = slice.placement;
    const layout::TensorSplit split =
        tensor.split(detail::parameter_of(held.name), held.global_shape);
    // What belongs to the parameter, but is not like it (a count of steps), is the same everywhere.
    if (split.is_whole() || held.global_shape != split.local_shape()) {
      all.push_back(slice);
      continue;
    }
    auto pieces = split.pieces(held.slice);
    if (pieces.empty()) pieces = {{held.slice, held.slice}};  // of nothing
    for (const auto& [local, global] : pieces) {
      NamedSlice piece = slice;
      piece.placement.global_shape = split.global_shape;
      piece.placement.slice = global;
      piece.tensor = detail::part_of(slice.tensor, held.slice, local);
      all.push_back(std::move(piece));
    }
  }
  return all;
}

std::vector<NamedSlice> state(const torch::nn::Module& model, optim::Optimizer& optimizer) {
  return joined(slices_of(model), slices_of(optimizer));
}

std::vector<NamedSlice> state(const torch::nn::Module& model, torch::optim::Optimizer& optimizer) {
  return joined(slices_of(model), slices_of(model, optimizer));
}

std::vector<NamedSlice> state(const parallel::ShardedModel& model, optim::Optimizer& optimizer) {
  return joined(slices_of(model), slices_of(model, optimizer));
}

std::vector<NamedSlice> state(const parallel::ShardedModel& model,
                              torch::optim::Optimizer& optimizer) {
  return joined(slices_of(model), slices_of(model, optimizer));
}

std::vector<NamedSlice> state(const parallel::Pipeline& pipeline, optim::Optimizer& optimizer) {
  return joined(slices_of(pipeline), slices_of(pipeline, optimizer));
}

std::vector<NamedSlice> state(const parallel::Pipeline& pipeline,
                              torch::optim::Optimizer& optimizer) {
  return joined(slices_of(pipeline), slices_of(pipeline, optimizer));
}

}  // namespace lockstep::checkpoint
