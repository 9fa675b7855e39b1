// SPDX-License-Identifier: Apache-2.0
// What a user asks of a sharded model.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <map>
#include <set>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/parallel/shard/consumed_norm.h"
#include "lockstep/parallel/shard/fully_shard.h"
#include "lockstep/parallel/shard/sharded_model_state.h"

namespace lockstep::parallel {

using detail::Member;

namespace {

// With the rows of each member that it holds, unless it is the model's own.
optim::NamedParameter placed(const detail::Flat& flat, const detail::OptimizedTensor& each) {
  optim::NamedParameter parameter{each.name, each.tensor};
  for (size_t i = each.first; i < each.end && !flat.plan().is_own(); ++i) {
    const Member& member = flat.members()[i];
    if (member.shard_numel() == 0) continue;
    parameter.parts.push_back(
        {flat.parameter.placement(member), member.shard_offset - each.range.begin});
  }
  return parameter;
}

}  // namespace

NoSyncShards::NoSyncShards(std::shared_ptr<detail::ShardedModelState> sharded)
    : sharded_(std::move(sharded)) {
  if (sharded_->engine) sharded_->engine->gradients().change_no_sync(1);
}
NoSyncShards::~NoSyncShards() {
  if (sharded_ && sharded_->engine) sharded_->engine->gradients().change_no_sync(-1);
}

Summon::Summon(std::shared_ptr<detail::ShardedModelState> sharded, SummonOptions options)
    : sharded_(std::move(sharded)), options_(options) {
  if (sharded_->engine) sharded_->engine->window().begin_summon(options_.write_back);
}
Summon::~Summon() {
  if (sharded_ && sharded_->engine) sharded_->engine->window().end_summon(options_.write_back);
}

std::shared_ptr<detail::ShardedModelState> ShardedModel::shared() const {
  if (sharded_->taken_over) {
    throw Error(
        "[fully_shard] this sharded model has become a part of a larger one; use what fully_shard "
        "returned for the outermost model");
  }
  if (sharded_->without_values) {
    throw Error(
        "[fully_shard] the parameters of this model are on the meta device; it gets their values "
        "when the model that deferred() returned is sharded, and is a part of that then");
  }
  return sharded_;
}

std::vector<at::Tensor> ShardedModel::parameters() const {
  return optim::tensors_of(named_parameters());
}

std::vector<optim::NamedParameter> ShardedModel::named_parameters() const {
  if (!shared()->engine) return optim::named_parameters(*shared()->model);
  std::vector<optim::NamedParameter> all;
  for (const auto& flat : shared()->engine->flats()) {
    for (const auto& each : flat->shard.optimized()) all.push_back(placed(*flat, each));
  }
  return all;
}

double ShardedModel::grad_norm(optim::NormOptions options) const {
  if (!shared()->engine) return optim::grad_norm(parameters(), options);
  const auto& groups = shared()->engine->groups();
  options.group = groups.reduce;
  if (const auto& tiers = shared()->engine->tiers(); tiers && tiers->updates_in_backward())
    return detail::consumed_norm(*shared()->engine);
  const auto& flats = shared()->engine->flats();
  options.exact = options.exact || std::any_of(flats.begin(), flats.end(), [](const auto& flat) {
                    return flat->plan().reproducible;
                  });
  return optim::grad_norm(optim::tensors_of(norm_parameters()), options);
}

std::vector<optim::NamedParameter> ShardedModel::norm_parameters() const {
  if (!shared()->engine) return named_parameters();
  std::vector<optim::NamedParameter> mine;
  for (const auto& flat : shared()->engine->flats()) {
    // What everybody has counts once.
    if (flat->plan().shard.size() == 1 && shared()->engine->groups().reduce.rank() != 0) continue;
    for (const auto& each : flat->shard.optimized()) mine.push_back({each.name, each.tensor});
  }
  // As the model has them: norms are summed in this order, and without an engine in the model's.
  std::map<std::string, size_t> place;
  for (const auto& item : shared()->model->named_parameters())
    place.emplace(item.key(), place.size());
  std::stable_sort(mine.begin(), mine.end(), [&](const auto& a, const auto& b) {
    const auto of = [&](const std::string& name) {
      const auto found = place.find(name);
      return found == place.end() ? place.size() : found->second;
    };
    return of(a.name) < of(b.name);
  });
  return mine;
}

void ShardedModel::reduce_gradients() {
  if (shared()->engine) shared()->engine->gradients().reduce_now();
}
void ShardedModel::set_micro_batch(std::optional<int64_t> index) {
  if (shared()->engine) shared()->engine->gradients().set_micro_batch(index);
}

double ShardedModel::clip_grad_norm_(double max_norm, optim::NormOptions options) const {
  detail::require_clipping(*this);
  const double norm = grad_norm(std::move(options));
  optim::clip_grad_with_norm(parameters(), max_norm, norm);
  return norm;
}

void ShardedModel::unshard(const std::string& unit) {
  if (shared()->engine) shared()->engine->pin(unit);
}
void ShardedModel::reshard(const std::string& unit) {
  if (shared()->engine) shared()->engine->units().unpin(unit);
}
bool ShardedModel::hold(int64_t budget) {
  const std::shared_ptr<detail::ShardEngine> engine = shared()->engine;
  return !engine || detail::hold({&engine, 1}, budget, engine->groups().all);
}
void ShardedModel::begin_update() {
  if (shared()->engine) shared()->engine->window().begin_update();
}
void ShardedModel::train(bool on) { shared()->model->train(on); }
bool ShardedModel::is_training() const { return shared()->model->is_training(); }
const FullyShardOptions& ShardedModel::options() const { return shared()->options; }

std::vector<std::string> ShardedModel::units() const {
  return shared()->engine ? shared()->engine->units().names() : std::vector<std::string>();
}

namespace {

detail::ShardedModelState::Place find(const detail::ShardedModelState& sharded,
                                      const std::string& name) {
  const auto place = sharded.find(name);
  if (place.flat != nullptr) return place;
  if (!sharded.engine && sharded.model->named_parameters().contains(name)) return place;
  throw ConfigError(format("[fully_shard] the model has no parameter '{}'", name));
}

}  // namespace

detail::ShardedModelState::Place detail::ShardedModelState::find(
    const std::string& parameter) const {
  for (size_t f = 0; engine && f < engine->flats().size(); ++f) {
    for (const Member& member : engine->flats()[f]->members()) {
      if (member.name == parameter) return {engine->flats()[f].get(), &member};
    }
  }
  return {};
}

ShardInfo ShardedModel::shard_info(const std::string& parameter) const {
  const auto [flat, member] = find(*shared(), parameter);
  if (flat == nullptr || flat->plan().shard.size() == 1) {
    throw ConfigError(
        format("[fully_shard] parameter '{}' is not sharded: every rank has all of it", parameter));
  }
  return {.rank = flat->plan().shard.rank(),
          .start = member->rows.begin * member->row_size,
          .size = member->shard_numel(),
          .original_shape = member->shape,
          .is_local = member->shard_numel() > 0};
}

ParameterState ShardedModel::state(const std::string& parameter) const {
  const auto [flat, member] = find(*shared(), parameter);
  return flat == nullptr ? ParameterState::gathered : flat->residence->state();
}

ShardStats ShardedModel::stats() const {
  ShardStats stats;
  int64_t whole_bytes = 0, local = 0, trained = 0;
  std::set<const c10::TensorImpl*> seen;
  for (const at::Tensor& parameter : shared()->model->parameters()) {
    if (!seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
    stats.num_parameters += parameter.numel();
    const int64_t bytes = static_cast<int64_t>(parameter.nbytes());
    whole_bytes += parameter.requires_grad() ? 2 * bytes : bytes;
    if (parameter.requires_grad()) trained += parameter.numel();
  }
  if (!shared()->engine) {
    stats.current_bytes = stats.peak_bytes = whole_bytes;
    return stats;
  }
  const detail::ShardEngine& engine = *shared()->engine;
  for (const auto& flat : engine.flats()) {
    for (const Member& member : flat->members()) {
      if (!flat->plan().trained) continue;
      local += flat->plan().shard.size() == 1 ? member.numel() : member.shard_numel();
    }
  }
  stats.local_ratio = trained == 0 ? 1 : static_cast<double>(local) / static_cast<double>(trained);
  stats.current_bytes = static_cast<int64_t>(engine.current_bytes());
  stats.peak_bytes = static_cast<int64_t>(engine.peak_bytes());
  stats.bytes_saved = whole_bytes - stats.current_bytes;
  stats.all_gathers = engine.environment().counts.all_gathers;
  stats.fetched_ahead = engine.environment().counts.fetched_ahead;
  stats.reduce_scatters = engine.environment().counts.reduce_scatters;
  stats.all_reduces = engine.environment().counts.all_reduces;
  stats.gather_bytes = static_cast<int64_t>(engine.environment().gather_memory.occupied());
  stats.gradient_bytes = static_cast<int64_t>(engine.environment().gradient_memory.occupied());
  stats.growths = static_cast<int64_t>(engine.environment().gather_memory.growths() +
                                       engine.environment().gradient_memory.allocations());
  return stats;
}

}  // namespace lockstep::parallel
