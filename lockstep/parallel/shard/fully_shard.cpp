// SPDX-License-Identifier: Apache-2.0
// From a model and a mesh to flats: who shares what with whom.
#include "lockstep/parallel/shard/fully_shard.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "lockstep/comm/collectives.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/parallel/data/same_model.h"
#include "lockstep/parallel/intercept/dispatch.h"
#include "lockstep/parallel/intercept/recording.h"
#include "lockstep/parallel/shard/arrange_offload.h"
#include "lockstep/parallel/shard/mixed_precision.h"
#include "lockstep/parallel/shard/sharded_model_state.h"
#include "lockstep/parallel/shard/units.h"

namespace lockstep::parallel {
namespace detail {
namespace {

using Strategy = ShardingStrategy;

NamedTensors list(const torch::OrderedDict<std::string, at::Tensor>& tensors) {
  NamedTensors named;
  for (const auto& item : tensors) {
    if (item.value().defined()) named.emplace_back(item.key(), item.value());
  }
  return named;
}

// Ranks of a host, where every host has as many and they follow each other. Collective.
int ranks_of_a_host(const comm::Group& group) {
  const at::Tensor mine = at::tensor(std::vector<int64_t>{group.local_size(), group.local_rank()});
  const at::Tensor all = at::empty({group.size(), 2}, at::kLong);
  comm::all_gather(all, mine, group, {.tag = "hosts of hybrid_shard"}).wait();
  const auto values = all.accessor<int64_t, 2>();
  for (int rank = 0; rank < group.size(); ++rank) {
    const auto [size, place] = std::pair(values[rank][0], values[rank][1]);
    if (size == values[0][0] && place == rank % size) continue;
    throw ConfigError(format(
        "[fully_shard] hybrid_shard takes the ranks of each host as a group, but rank {} is "
        "number {} of {} on its host, and rank 0's host has {}: every host must have as many "
        "ranks, one after the other; or give hybrid_group_size",
        rank, place, size, values[0][0]));
  }
  return group.local_size();
}

// With the group size that is meant, also for those who ask. Collective.
FullyShardOptions completed(FullyShardOptions options, const mesh::Mesh& mesh) {
  validate(options);
  if (options.strategy != Strategy::hybrid_shard) return options;
  int& size = options.advanced.hybrid_group_size;
  if (mesh.axes().size() == 2) {
    size = mesh.shape()[1];
  } else if (size == 0 && mesh.axes().size() == 1) {
    size = ranks_of_a_host(mesh.group());
  }
  return options;
}

// A mesh of two axes for hybrid_shard; of one for the others.
mesh::Mesh arranged(const mesh::Mesh& mesh, const FullyShardOptions& options) {
  const int size = mesh.size();
  if (options.strategy != Strategy::hybrid_shard) {
    if (options.advanced.hybrid_group_size != 0) {
      throw ConfigError(
          format("[fully_shard] hybrid_group_size is {}, but the strategy is {}; it "
                 "is for hybrid_shard",
                 options.advanced.hybrid_group_size, name_of(options.strategy)));
    }
    return mesh;
  }
  if (mesh.axes().size() == 2) return mesh;
  const int inner = options.advanced.hybrid_group_size;
  if (mesh.axes().size() > 2 || inner < 1 || size % inner != 0) {
    throw ConfigError(format(
        "[fully_shard] hybrid_shard over {} ranks ({}) with hybrid_group_size {}; give a mesh "
        "of two axes, or a size that divides the number of ranks",
        size, mesh.describe(), inner));
  }
  return {mesh.group(), {{"replicate", size / inner}, {"shard", inner}}};
}

// Of the engine's own, so that its collectives do not mix with the user's, nor those for parameters
// with those for gradients. Collective.
ShardGroups make_groups(const mesh::Mesh& mesh, Strategy strategy) {
  const auto own = [](const comm::Group& group) { return group.split(0, group.rank()); };
  // Ranks that use units in different orders must not mix them up.
  const auto gathering = [](const comm::Group& group) {
    return group.split(0, group.rank(), /*check=*/true);
  };
  const bool hybrid = strategy == Strategy::hybrid_shard;
  const comm::Group all = mesh.axes().size() > 1 ? mesh.flatten() : mesh.group();
  ShardGroups groups{.all = own(all)};
  if (hybrid) {
    const std::vector<std::string> axes = mesh.axis_names();
    const comm::Group inner = mesh[axes[1]];
    groups.shard = gathering(inner);
    groups.reduce = own(inner);
    groups.replicas = own(mesh[axes[0]]);
  } else {
    groups.shard = gathering(all);
    groups.reduce = groups.all;
  }
  return groups;
}

// Parameters of one unit that can share a line.
using FlatKind =
    std::tuple<bool /*whole*/, bool /*trained*/, at::ScalarType, std::string /*device*/>;

class Plans {
 public:
  Plans(const ShardGroups& groups, const FullyShardOptions& options)
      : groups_(groups), options_(options) {}

  std::vector<FlatPlan> make(torch::nn::Module& model, c10::Device meta_device) {
    const std::vector<UnitPlan> units = plan_units(model, options_.units);
    if (options_.advanced.granularity == ShardGranularity::tensors) choose_owners(model, units);
    for (const UnitPlan& unit : units) add(unit, meta_device);
    if (!small_.empty()) add_flats(kWholeTensors, small_, true, meta_device);
    return std::move(plans_);
  }

 private:
  // Tensors are dealt out in the model's order, so that small units do not all begin with rank 0.
  void choose_owners(const torch::nn::Module& model, const std::vector<UnitPlan>& units) {
    std::set<const c10::TensorImpl*> in_units;
    for (const UnitPlan& unit : units) {
      for (const auto& parameter : unit.parameters)
        in_units.insert(parameter.tensor.unsafeGetTensorImpl());
    }
    const std::vector<std::string>& first = options_.advanced.first_tensors;
    std::vector<const c10::TensorImpl*> impls;
    std::vector<layout::DealtTensor> tensors;
    for (const auto& item : model.named_parameters()) {
      const at::Tensor& tensor = item.value();
      if (!tensor.defined() || in_units.erase(tensor.unsafeGetTensorImpl()) == 0) continue;
      impls.push_back(tensor.unsafeGetTensorImpl());
      tensors.push_back({.elements = tensor.numel(), .trained = tensor.requires_grad()});
      const auto place = std::find(first.begin(), first.end(), item.key());
      if (place != first.end()) tensors.back().index = place - first.begin();
    }
    const auto owners =
        layout::owners_of_tensors(tensors, {.world = groups_.shard.size(),
                                            .min_elements = options_.min_num_params,
                                            .reserved = static_cast<int64_t>(first.size())});
    for (size_t i = 0; i < impls.size(); ++i) owners_[impls[i]] = owners[i];
  }

  // In the order in which the parameters lie in the line.
  void assign_owners(FlatPlan& plan) const {
    std::vector<int> owners;
    for (const auto& parameter : plan.parameters)
      owners.push_back(owners_.at(parameter.tensor.unsafeGetTensorImpl()));
    const std::vector<optim::NamedParameter> given = std::exchange(plan.parameters, {});
    for (const size_t i : layout::order_of_tensors(owners.size(), owners)) {
      plan.parameters.push_back(given[i]);
      plan.owners.push_back(owners[i]);
    }
  }

  void add(const UnitPlan& unit, c10::Device meta_device) {
    const bool whole = options_.strategy == Strategy::no_shard;
    std::map<FlatKind, std::vector<optim::NamedParameter>> kinds;
    for (const optim::NamedParameter& parameter : unit.parameters) {
      const FlatKind kind = kind_of(parameter);
      if (!whole && parameter.tensor.numel() < options_.min_num_params) {
        small_[kind].push_back(parameter);
      } else {
        kinds[kind].push_back(parameter);
      }
    }
    add_flats(unit.name, kinds, whole, meta_device);
  }

  static FlatKind kind_of(const optim::NamedParameter& parameter) {
    const at::Tensor& tensor = parameter.tensor;
    return {false, tensor.requires_grad(), tensor.scalar_type(), tensor.device().str()};
  }

  void add_flats(const std::string& name,
                 const std::map<FlatKind, std::vector<optim::NamedParameter>>& kinds, bool whole,
                 c10::Device meta_device) {
    const size_t first = plans_.size();
    for (const auto& [kind, parameters] : kinds) {
      FlatPlan plan{.unit = name, .name = name, .parameters = parameters};
      const at::Tensor& tensor = parameters[0].tensor;
      plan.trained = tensor.requires_grad();
      plan.device = tensor.is_meta() ? meta_device : tensor.device();
      plan.rest_device = std::holds_alternative<HostOffload>(options_.offload)
                             ? c10::Device(at::kCPU)
                             : plan.device;
      if (whole) {
        plan.resident = true;
        plan.whole_gradients = true;
        plan.replicas = groups_.all;
      } else {
        plan.resident = options_.strategy == Strategy::optimizer;
        plan.whole_gradients = plan.resident;
        plan.shard = groups_.shard;
        plan.reduce = groups_.reduce;
        plan.replicas = groups_.replicas;
        if (!owners_.empty()) assign_owners(plan);
      }
      choose_types(plan, options_.mixed_precision);
      plan.updates_as_one = !options_.use_orig_params;
      plan.reproducible = options_.reproducible;
      plan.keeps_copy_on_host = options_.advanced.keep_gathered_on_host;
      plans_.push_back(std::move(plan));
    }
    // Names of what the optimizer sees are different.
    for (size_t i = first; i < plans_.size() && plans_.size() - first > 1; ++i) {
      plans_[i].name +=
          format(":{}{}", c10::toString(plans_[i].dtype), plans_[i].trained ? "" : ":frozen");
    }
  }

  const ShardGroups& groups_;
  const FullyShardOptions& options_;
  std::map<FlatKind, std::vector<optim::NamedParameter>> small_;
  std::map<const c10::TensorImpl*, int> owners_;  // where ranks share whole tensors
  std::vector<FlatPlan> plans_;
};

void convert_buffers(torch::nn::Module& model, const FullyShardOptions& options) {
  if (!options.mixed_precision.buffer) return;
  for (at::Tensor& buffer : model.buffers()) {
    if (buffer.defined() && at::isFloatingType(buffer.scalar_type()))
      buffer.set_data(buffer.to(*options.mixed_precision.buffer));
  }
}

// Parameters of modules that look rows up.
std::set<std::string> embeddings_of(const torch::nn::Module& model) {
  std::set<std::string> names;
  for (const auto& item : model.named_modules()) {
    if (item.value()->name().find("Embedding") == std::string::npos) continue;
    for (const auto& parameter : item.value()->named_parameters(/*recurse=*/false))
      names.insert(item.key().empty() ? parameter.key() : item.key() + "." + parameter.key());
  }
  return names;
}

void check_not_sharded(const NamedTensors& parameters) {
  for (const auto& [name, tensor] : parameters) {
    const auto listeners = BackwardRounds::listeners_of(tensor);
    const bool listens = std::any_of(listeners.begin(), listeners.end(), [](const auto& each) {
      return std::dynamic_pointer_cast<GradientReduction>(each) != nullptr;
    });
    if (tensor.key_set().has(kShardKey) || listens) {
      throw ConfigError(
          format("[fully_shard] parameter {} is already part of a sharded model", name));
    }
  }
}

}  // namespace

ShardedModelState::ShardedModelState(torch::nn::Module& given, FullyShardOptions wanted,
                                     const mesh::Mesh& given_mesh, const Recording* recording,
                                     const MaterializeOptions& initializer)
    : model(given.weak_from_this().lock(), &given),
      options(completed(std::move(wanted), given_mesh)) {
  const at::NoGradGuard no_grad;
  const mesh::Mesh mesh = arranged(given_mesh, options);
  const NamedTensors parameters = list(model->named_parameters());
  check_not_sharded(parameters);
  const bool needs_engine = mesh.size() > 1 || options.reproducible ||
                            !std::holds_alternative<NoOffload>(options.offload) ||
                            options.mixed_precision.param || options.mixed_precision.reduce;
  if (!needs_engine) {
    if (recording != nullptr) materialize(*model, *recording, initializer);
    convert_buffers(*model, options);
    return;
  }
  install_fallback("fully_shard");
  const ShardGroups groups = make_groups(mesh, options.strategy);
  NamedTensors all = parameters;
  for (auto& buffer : list(model->named_buffers())) all.push_back(std::move(buffer));
  check_same_model(all, groups.all);
  FlatShard::ValueOf value_of = [](const optim::NamedParameter& parameter) {
    return parameter.tensor;
  };
  if (recording != nullptr) {
    materialize_rest(*model, *recording, initializer);
    value_of = [&](const optim::NamedParameter& parameter) {
      return initial_value({parameter.name, parameter.tensor}, *recording, initializer);
    };
  } else {
    broadcast_tensors(all, groups.all, 0);
  }
  check_own_devices("fully_shard", parameters, groups.all);
  if (options.reproducible) check_same_threads("fully_shard", groups.all);
  engine = std::make_shared<ShardEngine>(groups, options, model);
  auto plans = Plans(groups, options).make(*model, initializer.device);
  std::shared_ptr<OffloadTiers> tiers;
  if (const auto* offload = std::get_if<layout::OffloadOptions>(&options.offload)) {
    tiers = arrange_offload(
        plans, *offload, groups.all.members()[static_cast<size_t>(groups.all.rank())],
        [names = embeddings_of(*model)](const std::string& name) { return names.contains(name); });
  }
  engine->start(std::move(plans), value_of, std::move(tiers));
  convert_buffers(*model, options);
}

mesh::Mesh as_mesh(const comm::Group& group) { return mesh::Mesh::linear(group, "dp"); }

ShardedModel fully_shard_deferred(torch::nn::Module& model, const Recording& recording,
                                  const mesh::Mesh& mesh, FullyShardOptions options,
                                  const MaterializeOptions& initializer) {
  return ShardedModel(std::make_shared<ShardedModelState>(model, std::move(options), mesh,
                                                          &recording, initializer));
}

}  // namespace detail

ShardedModel fully_shard(torch::nn::Module& model, const mesh::Mesh& mesh,
                         FullyShardOptions options) {
  return ShardedModel(std::make_shared<detail::ShardedModelState>(model, std::move(options), mesh,
                                                                  nullptr, MaterializeOptions{}));
}

ShardedModel fully_shard(torch::nn::Module& model, const comm::Group& group,
                         FullyShardOptions options) {
  return fully_shard(model, detail::as_mesh(group), std::move(options));
}

}  // namespace lockstep::parallel
