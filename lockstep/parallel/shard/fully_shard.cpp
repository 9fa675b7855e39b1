// SPDX-License-Identifier: Apache-2.0
// From a model and a mesh to flats: who shares what with whom.
#include "lockstep/parallel/shard/fully_shard.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <set>
#include <string_view>
#include <tuple>
#include <utility>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/control/rank_texts.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/parallel/data/same_model.h"
#include "lockstep/parallel/intercept/dispatch.h"
#include "lockstep/parallel/intercept/recording.h"
#include "lockstep/parallel/shard/arrange_offload.h"
#include "lockstep/parallel/shard/mixed_precision.h"
#include "lockstep/parallel/shard/nesting.h"
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
  Plans(const ShardGroups& groups, bool rehearsed) : groups_(groups), rehearsed_(rehearsed) {}

  std::vector<FlatPlan> make(const torch::nn::Module& model, const std::vector<UnitPlan>& units,
                             const FullyShardOptions& outermost, c10::Device meta_device) {
    if (outermost.advanced.granularity == ShardGranularity::tensors)
      choose_owners(model, units, outermost);
    for (const UnitPlan& unit : units) add(unit, meta_device);
    for (size_t i = 0; i < small_.size(); ++i) {
      const auto& [options, kinds] = small_[i];
      const size_t first = plans_.size();
      add_flats(kWholeTensors, kinds, *options, /*whole=*/true, meta_device);
      // Those of other options are other tensors to the optimizer.
      for (size_t p = first; p < plans_.size() && i > 0; ++p)
        plans_[p].name += format(" {}", i + 1);
    }
    return std::move(plans_);
  }

 private:
  using Kinds = std::map<FlatKind, std::vector<optim::NamedParameter>>;
  using Options = std::shared_ptr<const FullyShardOptions>;

  // Tensors are dealt out in the model's order, so that small units do not all begin with rank 0.
  // The granularity is that of the whole model; which tensors stay whole is said by their units.
  void choose_owners(const torch::nn::Module& model, const std::vector<UnitPlan>& units,
                     const FullyShardOptions& outermost) {
    std::map<const c10::TensorImpl*, const FullyShardOptions*> options_of;
    for (const UnitPlan& unit : units) {
      for (const auto& parameter : unit.parameters)
        options_of[parameter.tensor.unsafeGetTensorImpl()] = unit.options.get();
    }
    const std::vector<std::string>& first = outermost.advanced.first_tensors;
    std::vector<const c10::TensorImpl*> impls;
    std::vector<layout::DealtTensor> tensors;
    for (const auto& item : model.named_parameters()) {
      const at::Tensor& tensor = item.value();
      if (!tensor.defined()) continue;
      const auto unit = options_of.extract(tensor.unsafeGetTensorImpl());
      if (unit.empty()) continue;
      const FullyShardOptions& options = *unit.mapped();
      const bool whole =
          options.strategy == Strategy::no_shard || tensor.numel() < options.min_num_params;
      impls.push_back(tensor.unsafeGetTensorImpl());
      tensors.push_back(
          {.elements = whole ? 0 : tensor.numel(), .trained = tensor.requires_grad()});
      if (const auto place = place_among(first, item.key()))
        tensors.back().index = static_cast<int64_t>(*place);
    }
    const auto owners =
        layout::owners_of_tensors(tensors, {.world = groups_.shard.size(),
                                            .min_elements = 1,
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
    const bool whole = unit.options->strategy == Strategy::no_shard;
    Kinds kinds;
    for (const optim::NamedParameter& parameter : unit.parameters) {
      const FlatKind kind = kind_of(parameter);
      if (!whole && parameter.tensor.numel() < unit.options->min_num_params) {
        small_of(unit.options)[kind].push_back(parameter);
      } else {
        kinds[kind].push_back(parameter);
      }
    }
    add_flats(unit.name, kinds, *unit.options, whole, meta_device);
  }

  static FlatKind kind_of(const optim::NamedParameter& parameter) {
    const at::Tensor& tensor = parameter.tensor;
    return {false, tensor.requires_grad(), shard_dtype(tensor), tensor.device().str()};
  }

  // Small tensors of all units go together, where nothing that their options say tells them apart.
  Kinds& small_of(const Options& options) {
    const auto facts = [](const FullyShardOptions& each) {
      const MixedPrecision& precision = each.mixed_precision;
      return std::tuple(precision.param, precision.reduce, precision.keep_low_precision_grads,
                        each.use_orig_params, each.reproducible, each.offload.index(),
                        each.strategy == Strategy::shard_grad_op,
                        each.advanced.keep_gathered_on_host);
    };
    for (auto& [known, kinds] : small_) {
      if (facts(*known) == facts(*options)) return kinds;
    }
    return small_.emplace_back(options, Kinds{}).second;
  }

  void add_flats(const std::string& name, const Kinds& kinds, const FullyShardOptions& options,
                 bool whole, c10::Device meta_device) {
    const size_t first = plans_.size();
    for (const auto& [kind, parameters] : kinds) {
      FlatPlan plan{.unit = name, .name = name, .parameters = parameters};
      const at::Tensor& tensor = parameters[0].tensor;
      plan.trained = tensor.requires_grad();
      plan.dtype = shard_dtype(tensor);
      plan.device = tensor.is_meta() ? meta_device : tensor.device();
      plan.rest_device = std::holds_alternative<HostOffload>(options.offload)
                             ? c10::Device(at::kCPU)
                             : plan.device;
      if (whole) {
        plan.resident = true;
        plan.whole_gradients = true;
        plan.replicas = groups_.all;
      } else {
        plan.resident = options.strategy == Strategy::optimizer;
        plan.whole_gradients = plan.resident;
        plan.shard = groups_.shard;
        plan.reduce = groups_.reduce;
        plan.replicas = groups_.replicas;
        plan.rehearsed = rehearsed_;
        if (!owners_.empty()) assign_owners(plan);
      }
      choose_types(plan, options.mixed_precision);
      plan.kept_for_backward = options.strategy == Strategy::shard_grad_op;
      plan.updates_as_one = !options.use_orig_params;
      plan.reproducible = options.reproducible;
      plan.keeps_copy_on_host = options.advanced.keep_gathered_on_host;
      plans_.push_back(std::move(plan));
    }
    // Names of what the optimizer sees are different.
    for (size_t i = first; i < plans_.size() && plans_.size() - first > 1; ++i) {
      plans_[i].name +=
          format(":{}{}", c10::toString(plans_[i].dtype), plans_[i].trained ? "" : ":frozen");
    }
  }

  const ShardGroups& groups_;
  const bool rehearsed_;
  std::vector<std::pair<Options, Kinds>> small_;
  std::map<const c10::TensorImpl*, int> owners_;  // where ranks share whole tensors
  std::vector<FlatPlan> plans_;
};

// Those of sharded submodules are what their own options say.
void convert_buffers(torch::nn::Module& model, const FullyShardOptions& options,
                     const std::vector<NestedModel>& nested) {
  if (!options.mixed_precision.buffer) return;
  std::set<const c10::TensorImpl*> of_others;
  for (const NestedModel& inner : nested) {
    for (const at::Tensor& buffer : inner.module.lock()->buffers())
      of_others.insert(buffer.unsafeGetTensorImpl());
  }
  for (at::Tensor& buffer : model.buffers()) {
    if (buffer.defined() && at::isFloatingType(buffer.scalar_type()) &&
        !of_others.contains(buffer.unsafeGetTensorImpl())) {
      buffer.set_data(buffer.to(*options.mixed_precision.buffer));
    }
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

// In a sharded submodule a parameter may be; a unit of it takes the parameter over.
void check_not_sharded(const NamedTensors& parameters, const std::vector<NestedModel>& nested) {
  std::set<const c10::TensorImpl*> of_nested;
  for (const NestedModel& inner : nested) {
    for (const at::Tensor& parameter : inner.module.lock()->parameters())
      of_nested.insert(parameter.unsafeGetTensorImpl());
  }
  for (const auto& [name, tensor] : parameters) {
    if (of_nested.contains(tensor.unsafeGetTensorImpl())) continue;
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

// A group of one is to refuse what several ranks would: the optimizer gets tensors of its own.
bool rehearses(const mesh::Mesh& mesh) {
  constexpr const char* kVariable = "LOCKSTEP_REHEARSE";
  const char* const given = std::getenv(kVariable);
  const std::string_view value = given == nullptr ? "" : given;
  if (value == "1") return mesh.size() == 1;
  if (value.empty() || value == "0") return false;
  throw ConfigError(format("[fully_shard] {} is '{}', must be 0 or 1", kVariable, value));
}

bool needs_engine(const FullyShardOptions& options) {
  return options.reproducible || !std::holds_alternative<NoOffload>(options.offload) ||
         options.mixed_precision.param || options.mixed_precision.reduce;
}

// A model whose parameters are on the meta device waits for one around it that deferred() returned.
void require_later(const FullyShardOptions& options, const std::vector<NestedModel>& nested) {
  for (const NestedModel& inner : nested) {
    if (!inner.has_engine) continue;
    throw ConfigError(
        format("[fully_shard] parameters are on the meta device, but those of the sharded "
               "submodule '{}' have values; give all of them values first, or none",
               inner.path));
  }
  if (!options.mixed_precision.buffer) return;
  throw ConfigError(
      format("[fully_shard] mixed_precision.buffer is {}, but the submodule is on the meta device: "
             "its buffers get their values with the model around it; give the option there",
             c10::toString(*options.mixed_precision.buffer)));
}

// Names say who is sharded already, so that ranks which differ in that hear of it.
NamedTensors with_nesting(NamedTensors tensors, const std::vector<NestedModel>& nested) {
  for (auto& [name, tensor] : tensors) {
    for (const NestedModel& inner : nested) {
      if (name.starts_with(inner.path + ".")) name += format(" of sharded {}", inner.path);
    }
  }
  return tensors;
}

// Before any rank changes a sharded submodule, all have looked at theirs. Collective.
void agree_on_nesting(const std::vector<NestedModel>& nested, const FullyShardOptions& options,
                      const std::vector<int>& ranks, bool has_recording, const comm::Group& group) {
  if (nested.empty()) return;
  comm::run_on_all_ranks("fully_shard", group, [&] {
    require_nestable(nested, options, ranks, has_recording);
    return std::string();
  });
}

}  // namespace

ShardedModelState::ShardedModelState(torch::nn::Module& given, FullyShardOptions wanted,
                                     const mesh::Mesh& given_mesh, const Recording* recording,
                                     const MaterializeOptions& initializer)
    : model(given.weak_from_this().lock(), &given),
      options(completed(std::move(wanted), given_mesh)),
      ranks(given_mesh.members()) {
  const at::NoGradGuard no_grad;
  const mesh::Mesh mesh = arranged(given_mesh, options);
  const NamedTensors parameters = list(model->named_parameters());
  const std::vector<NestedModel> nested = find_nested(*model);
  check_not_sharded(parameters, nested);
  const std::vector<UnitPlan> units = plan_with_options(nested);
  without_values =
      recording == nullptr && std::any_of(parameters.begin(), parameters.end(),
                                          [](const auto& named) { return named.second.is_meta(); });
  const bool rehearsed = rehearses(mesh);
  const bool needed =
      rehearsed || std::any_of(units.begin(), units.end(),
                               [](const UnitPlan& unit) { return needs_engine(*unit.options); });
  if (without_values || (mesh.size() == 1 && !needed && !needs_engine(options))) {
    require_nestable(nested, options, ranks, recording != nullptr);
    if (without_values) require_later(options, nested);
    take_over(nested);
    if (recording != nullptr) materialize(*model, *recording, initializer);
    if (!without_values) convert_buffers(*model, options, nested);
    return;
  }
  install_fallback("fully_shard");
  const ShardGroups groups = make_groups(mesh, options.strategy);
  NamedTensors all = parameters;
  for (auto& buffer : list(model->named_buffers())) all.push_back(std::move(buffer));
  check_same_model("fully_shard", with_nesting(all, nested), groups.all);
  agree_on_nesting(nested, options, ranks, recording != nullptr, groups.all);
  NestedValues nested_values(groups.reduce);
  FlatShard::ValueOf value_of = [&](const optim::NamedParameter& parameter) {
    return nested_values(parameter.tensor);
  };
  if (recording != nullptr) {
    materialize_rest(*model, *recording, initializer);
    value_of = [&](const optim::NamedParameter& parameter) {
      return initial_value({parameter.name, parameter.tensor}, *recording, initializer);
    };
  } else {
    // What is sharded has been rank 0's since then.
    std::erase_if(all, [](const auto& named) { return find_tag(named.second) != nullptr; });
    broadcast_tensors(all, groups.all, 0);
  }
  check_own_devices("fully_shard", parameters, groups.all);
  if (options.reproducible) check_same_threads("fully_shard", groups.all);
  engine = std::make_shared<ShardEngine>(groups, options, model);
  auto plans = Plans(groups, rehearsed).make(*model, units, options, initializer.device);
  std::shared_ptr<OffloadTiers> tiers;
  if (const auto* offload = std::get_if<layout::OffloadOptions>(&options.offload)) {
    tiers = arrange_offload(
        plans, *offload, groups.all,
        [names = embeddings_of(*model)](const std::string& name) { return names.contains(name); });
  }
  take_over(nested);
  engine->start(std::move(plans), value_of, std::move(tiers));
  convert_buffers(*model, options, nested);
}

std::vector<UnitPlan> ShardedModelState::plan_with_options(const std::vector<NestedModel>& nested) {
  auto own = std::make_shared<FullyShardOptions>(options);
  own->units = OneUnit{};  // units are known by their names from here on
  std::vector<UnitPlan> units =
      plan_units(*model, options.units, parallel::detail::known_units(nested));
  for (UnitPlan& unit : units) {
    if (!unit.options) unit.options = own;
    KnownUnit known{.path = unit.path, .parameters = {}, .options = unit.options};
    for (const auto& parameter : unit.parameters) known.parameters.push_back(parameter.name);
    known_units.push_back(std::move(known));
  }
  return units;
}

namespace {

ShardedModel make_sharded(torch::nn::Module& model, FullyShardOptions options,
                          const mesh::Mesh& mesh, const Recording* recording,
                          const MaterializeOptions& initializer) {
  auto state =
      std::make_shared<ShardedModelState>(model, std::move(options), mesh, recording, initializer);
  remember_sharded(state);
  return ShardedModel(std::move(state));
}

}  // namespace

mesh::Mesh as_mesh(const comm::Group& group) { return mesh::Mesh::linear(group, "dp"); }

ShardedModel fully_shard_deferred(torch::nn::Module& model, const Recording& recording,
                                  const mesh::Mesh& mesh, FullyShardOptions options,
                                  const MaterializeOptions& initializer) {
  return make_sharded(model, std::move(options), mesh, &recording, initializer);
}

}  // namespace detail

ShardedModel fully_shard(torch::nn::Module& model, const mesh::Mesh& mesh,
                         FullyShardOptions options) {
  return detail::make_sharded(model, std::move(options), mesh, nullptr, MaterializeOptions{});
}

ShardedModel fully_shard(torch::nn::Module& model, const comm::Group& group,
                         FullyShardOptions options) {
  return fully_shard(model, detail::as_mesh(group), std::move(options));
}

}  // namespace lockstep::parallel
