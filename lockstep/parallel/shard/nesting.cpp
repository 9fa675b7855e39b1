// SPDX-License-Identifier: Apache-2.0
#include "lockstep/parallel/shard/nesting.h"

#include <ATen/ATen.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <set>

#include "lockstep/comm/collectives.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/parallel/shard/sharded_model_state.h"

namespace lockstep::parallel::detail {
namespace {

using torch::nn::Module;

// A module has no place for what is known about it, and on one rank, or where tensors stay whole,
// nothing about its parameters tells that it was sharded. So the process remembers. An entry holds
// neither tensors nor the module.
struct Registry {
  std::mutex mutex;
  std::map<const Module*, NestedModel> models;
};

Registry& registry() {
  static Registry all;
  return all;
}

const char* name_of(Prefetch when) {
  return when == Prefetch::pre ? "pre" : when == Prefetch::post ? "post" : "none";
}
const char* name_of(NoSyncGradients what) {
  return what == NoSyncGradients::sharded ? "sharded" : "unreduced";
}
const char* name_of(bool on) { return on ? "true" : "false"; }
int name_of(int number) { return number; }

const char* name_of(const Offload& offload) {
  constexpr std::array<const char*, 3> kNames{"NoOffload", "HostOffload", "OffloadOptions"};
  return kNames[offload.index()];
}

// An option that the outermost call decides for all units.
template <class Value>
void require_same(const NestedModel& inner, const char* option, Value of_inner, Value of_outer,
                  Value not_given) {
  if (of_inner == of_outer || of_inner == not_given) return;
  throw ConfigError(
      format("[fully_shard] {} is {} in the sharded submodule '{}' and {} in the model around it; "
             "the outermost call decides it for all units, so give it there alone",
             option, name_of(of_inner), inner.path, name_of(of_outer)));
}

void require_options(const NestedModel& inner, const FullyShardOptions& mine,
                     const FullyShardOptions& outer) {
  const FullyShardOptions defaults = {};
  const FullyShardAdvancedOptions &a = mine.advanced, &b = outer.advanced, &d = defaults.advanced;
  require_same(inner, "no_sync", mine.no_sync, outer.no_sync, defaults.no_sync);
  require_same(inner, "forward_prefetch", a.forward_prefetch, b.forward_prefetch,
               d.forward_prefetch);
  require_same(inner, "backward_prefetch", a.backward_prefetch, b.backward_prefetch,
               d.backward_prefetch);
  require_same(inner, "prefetch_depth", a.prefetch_depth, b.prefetch_depth, d.prefetch_depth);
  require_same(inner, "limit_all_gathers", a.limit_all_gathers, b.limit_all_gathers,
               d.limit_all_gathers);
  require_same(inner, "granularity", a.granularity, b.granularity, d.granularity);
  const bool tiers = std::holds_alternative<layout::OffloadOptions>(outer.offload);
  if (std::holds_alternative<layout::OffloadOptions>(mine.offload) ||
      (tiers && std::holds_alternative<HostOffload>(mine.offload))) {
    throw ConfigError(
        format("[fully_shard] offload is {} in the sharded submodule '{}' and {} in the model "
               "around it; budgets are for a whole model, so give offload to the outermost call "
               "alone",
               name_of(mine.offload), inner.path, name_of(outer.offload)));
  }
  using Strategy = ShardingStrategy;
  const bool same_ranks =
      (mine.strategy == Strategy::hybrid_shard) == (outer.strategy == Strategy::hybrid_shard) &&
      a.hybrid_group_size == b.hybrid_group_size;
  if (!same_ranks && mine.strategy != Strategy::no_shard) {
    throw ConfigError(
        format("[fully_shard] the strategy is {} (hybrid_group_size {}) in the sharded submodule "
               "'{}' and {} (hybrid_group_size {}) in the model around it; hybrid_shard is "
               "combined with no_shard, and with hybrid_shard in groups of the same size",
               layout::name_of(mine.strategy), a.hybrid_group_size, inner.path,
               layout::name_of(outer.strategy), b.hybrid_group_size));
  }
  // Its units, with what the outermost call decides.
  FullyShardOptions together = mine;
  together.no_sync = outer.no_sync;
  if (tiers) together.offload = outer.offload;
  try {
    validate(together);
  } catch (const ConfigError& error) {
    throw ConfigError(format("[fully_shard] sharded submodule '{}' in a model with {}: {}",
                             inner.path, name_of(outer.offload), error.what()));
  }
}

[[noreturn]] void refuse_used(const NestedModel& inner, const std::string& what) {
  throw ConfigError(
      format("[fully_shard] the sharded submodule '{}' {}; wrap inner modules and the model around "
             "them one after the other, then make the optimizer and train",
             inner.path, what));
}

void require_unused(const NestedModel& inner, const Module& module) {
  for (const auto& item : module.named_parameters()) {
    const at::Tensor& parameter = item.value();
    if (parameter.defined() && parameter.grad().defined())
      refuse_used(inner, format("has a gradient of '{}'", item.key()));
    const Tag* const tag = parameter.defined() ? find_tag(parameter) : nullptr;
    if (tag == nullptr || tag->engine.lock()) continue;
    if (!tag->left) refuse_used(inner, format("has lost the values of '{}'", item.key()));
    if (tag->left->tagged && tag->left->tagged.use_count() > 1)
      refuse_used(inner, "was given to an optimizer, or a state dict of it is held");
  }
  const auto state = inner.state.lock();
  if (!state || !state->engine) return;
  ShardEngine& engine = *state->engine;
  if (engine.gradients().is_under_no_sync()) refuse_used(inner, "is under no_sync()");
  if (engine.units().is_kept()) refuse_used(inner, "is under summon() or unshard()");
  for (const auto& flat : engine.flats()) {
    flat->parameter.check_views();
    for (const OptimizedTensor& each : flat->shard.optimized()) {
      if (each.tensor.grad().defined())
        refuse_used(inner, format("has a gradient of '{}'", each.name));
    }
    if (flat->shard.is_held())
      refuse_used(inner, "was given to an optimizer, or a state dict of it is held");
  }
  engine.units().end_pass();
}

}  // namespace

void remember_sharded(const std::shared_ptr<ShardedModelState>& state) {
  std::weak_ptr<Module> module = state->model;
  if (module.expired()) return;
  NestedModel made{.module = module,
                   .state = state,
                   .options = state->options,
                   .ranks = state->ranks,
                   .has_engine = state->engine != nullptr,
                   .units = state->known_units};
  made.options.units = OneUnit{};  // a predicate may refer to what goes
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  std::erase_if(all.models, [](const auto& item) { return item.second.module.expired(); });
  all.models[state->model.get()] = std::move(made);
}

std::vector<NestedModel> find_nested(Module& model) {
  std::vector<NestedModel> found;
  std::set<const Module*> visited;
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  const auto visit = [&](const auto& self, Module& module, const std::string& path) -> void {
    if (!visited.insert(&module).second) return;
    const auto known = all.models.find(&module);
    if (!path.empty() && known != all.models.end() && !known->second.module.expired()) {
      found.push_back(known->second);
      found.back().path = path;
      return;
    }
    for (const auto& child : module.named_children())
      self(self, *child.value(), path.empty() ? child.key() : path + "." + child.key());
  };
  visit(visit, model, "");
  return found;
}

KnownUnits known_units(const std::vector<NestedModel>& nested) {
  KnownUnits known;
  for (const NestedModel& inner : nested) known.emplace(inner.module.lock().get(), inner.units);
  return known;
}

at::ScalarType shard_dtype(const at::Tensor& parameter) {
  const Tag* const tag = find_tag(parameter);
  if (tag == nullptr) return parameter.scalar_type();
  if (tag->left) return tag->left->values.scalar_type();
  const auto engine = tag->engine.lock();
  return engine ? engine->flats()[tag->flat]->plan().dtype : parameter.scalar_type();
}

void require_nestable(const std::vector<NestedModel>& nested, const FullyShardOptions& options,
                      const std::vector<int>& ranks, bool has_recording) {
  for (const NestedModel& inner : nested) {
    if (inner.ranks != ranks) {
      throw ConfigError(
          format("[fully_shard] the submodule '{}' is sharded over the ranks {}, and the model "
                 "around it over {}; they must be the same, in the same order",
                 inner.path, join(inner.ranks), join(ranks)));
    }
    require_options(inner, inner.options, options);
    for (const KnownUnit& unit : inner.units) require_options(inner, *unit.options, options);
    if (has_recording && inner.has_engine) {
      throw ConfigError(
          format("[fully_shard] the submodule '{}' was sharded before it had its initial values, "
                 "which the model around it gets from deferred() now; only submodules with "
                 "parameters on the meta device can be sharded before",
                 inner.path));
    }
    require_unused(inner, *inner.module.lock());
  }
}

void take_over(const std::vector<NestedModel>& nested) {
  for (const NestedModel& inner : nested) {
    if (const auto state = inner.state.lock()) {
      state->taken_over = true;
      state->engine.reset();
    }
    Registry& all = registry();
    const std::lock_guard lock(all.mutex);
    all.models.erase(inner.module.lock().get());
  }
}

at::Tensor NestedValues::operator()(const at::Tensor& parameter) {
  const Tag* const tag = find_tag(parameter);
  if (tag == nullptr || !tag->left) return parameter;
  if (tag->left != left_) {
    line_.reset();
    left_ = tag->left;
    line_ = left_->values;
    if (left_->counts.size() > 1) {
      int64_t size = 0;
      for (const int64_t count : left_->counts) size += count;
      line_ = at::empty({size}, left_->values.options());
      comm::all_gather(line_, left_->values, group_,
                       {.counts = left_->counts, .tag = "values of an inner model"})
          .wait();
    }
  }
  return line_.narrow(0, parameter.storage_offset(), parameter.numel()).view(parameter.sizes());
}

}  // namespace lockstep::parallel::detail
