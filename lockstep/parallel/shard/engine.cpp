// SPDX-License-Identifier: Apache-2.0
#include "lockstep/parallel/shard/engine.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/nn/module.h>

#include <algorithm>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/layout/offload_plan.h"

namespace lockstep::parallel::detail {
namespace {

Phase current_phase() {
  if (torch::autograd::get_current_graph_task_exec_info() != nullptr) return Phase::backward;
  return at::GradMode::is_enabled() ? Phase::forward : Phase::no_grad;
}

}  // namespace

ShardEngine::ShardEngine(ShardGroups groups, FullyShardOptions options,
                         std::weak_ptr<const torch::nn::Module> model)
    : groups_(std::move(groups)),
      options_(std::move(options)),
      model_(std::move(model)),
      copy_thread_(groups_.all.members()[static_cast<size_t>(groups_.all.rank())]) {}

void ShardEngine::start(std::vector<FlatPlan> plans, const Flat::ValueOf& value_of,
                        std::shared_ptr<OffloadTiers> tiers) {
  tiers_ = std::move(tiers);
  size_t capacity = 0;
  c10::Device device = at::kCPU;
  for (const FlatPlan& plan : plans) {
    for (const UnitParameter& parameter : plan.parameters) {
      // In two types at most, with padding; and the gradients of shards on their way.
      capacity += 3 * (static_cast<size_t>(parameter.tensor.numel()) * 8 + 64);
    }
    device = plan.device;
  }
  gather_memory_ = std::make_unique<GatherMemory>(capacity + 4096, device);
  gradient_memory_ = std::make_unique<GradientMemory>(groups_.reduce, device, tiers_);
  for (FlatPlan& plan : plans) {
    const size_t index = flats_.size();
    const std::string name = plan.unit;
    flats_.push_back(std::make_unique<Flat>(std::move(plan),
                                            FlatContext{.options = &options_,
                                                        .engine = weak_from_this(),
                                                        .gather_memory = gather_memory_.get(),
                                                        .gradient_memory = gradient_memory_.get(),
                                                        .copy_thread = &copy_thread_,
                                                        .is_last_round = &last_round_},
                                            index, value_of));
    Flat& flat = *flats_.back();
    one_sided_ = one_sided_ || flat.is_one_sided();
    auto unit = std::find_if(units_.begin(), units_.end(),
                             [&](const Unit& each) { return each.name == name; });
    if (unit == units_.end()) unit = units_.insert(units_.end(), {.name = name});
    if (!flat.is_plain() && !flat.plan().resident) unit->flats.push_back(&flat);
    unit_of_.push_back(static_cast<size_t>(unit - units_.begin()));
    arrived_.emplace_back(flat.members().size(), 0);
  }
  size_t line_bytes = 0, gradient_bytes = 0;
  for (const auto& flat : flats_) {
    const auto bytes = [&](at::ScalarType dtype) {
      return static_cast<size_t>(flat->layout().size) * c10::elementSize(dtype);
    };
    const FlatPlan& plan = flat->plan();
    if (!flat->is_plain() && !plan.resident)
      line_bytes = std::max(line_bytes, bytes(plan.compute_dtype));
    if (flat->reduces_to_shards() || (plan.offload && !flat->keeps_gradients()))
      gradient_bytes = std::max(gradient_bytes, bytes(plan.reduce_dtype));
  }
  gather_memory_->expect(line_bytes);
  gradient_memory_->expect(gradient_bytes);
  // Backward produces gradients roughly in reverse; the first one tells better. Whole tensors are
  // those of all units, so they are complete at its end.
  for (size_t i = flats_.size(); i-- > 0;) {
    if (flats_[i]->plan().trained) launch_order_.push_back(i);
  }
  std::stable_partition(launch_order_.begin(), launch_order_.end(),
                        [&](size_t i) { return flats_[i]->plan().shard.size() > 1; });
  if (tiers_) gradient_memory_->reserve();  // before lines come and go
  install_hooks();
  note_bytes();
}

// ---- parameters ----

void ShardEngine::gather(Flat& flat) {
  const bool ahead = flat.state() == ParameterState::gathering;
  const bool communicates = flat.gather_communicates();
  if (tiers_ && flat.state() == ParameterState::sharded && !flat.has_room()) make_way();
  if (!flat.gather()) return;
  if (communicates) {
    ++counts_.all_gathers;
    if (ahead) ++counts_.fetched_ahead;
  }
  note_bytes();
}

Prefetch ShardEngine::prefetch_in(Phase phase) const {
  return phase == Phase::backward ? options_.backward_prefetch : options_.forward_prefetch;
}

// In eval mode no unit waits for a backward, whatever the grad mode.
bool ShardEngine::evaluates(Phase phase) const {
  if (phase == Phase::backward) return false;
  const auto model = model_.lock();
  return model && !model->is_training();
}

bool ShardEngine::may_release(const Unit& unit, Phase phase) const {
  if (is_kept(unit)) return false;
  if (options_.strategy != ShardingStrategy::shard_grad_op || phase == Phase::no_grad) return true;
  if (evaluates(phase)) return true;
  // Its backward is still to come.
  return phase == Phase::backward && unit.used_in_backward;
}

void ShardEngine::release(Unit& unit) {
  for (Flat* flat : unit.flats) flat->release();
}

// What was fetched and is not used yet gives way.
void ShardEngine::make_way() {
  for (size_t unit = 0; unit < units_.size(); ++unit) {
    if (unit != current_ && !held_.contains(unit) && !is_kept(units_[unit])) release(units_[unit]);
  }
}

void ShardEngine::release_all() {
  for (Unit& unit : units_) {
    if (!is_kept(unit)) release(unit);
  }
  // What stays has arrived: from here on this rank reads nothing of its peers.
  for (const auto& flat : flats_) {
    if (flat->state() == ParameterState::gathering) gather(*flat);
  }
}

void ShardEngine::fetch_ahead(std::span<const size_t> units) {
  for (const size_t unit : units) {
    if (unit == current_) continue;
    for (Flat* flat : units_[unit].flats) {
      flat->prefetch();
      if (tiers_ && !tiers_->options.async_prefetch && flat->state() == ParameterState::gathering)
        gather(*flat);
    }
  }
}

std::vector<size_t> ShardEngine::ahead() const {
  if (!tiers_) return order_.ahead(options_.prefetch_depth);
  std::vector<size_t> units = order_.ahead(tiers_->options.prefetch), counts;
  for (const size_t unit : units) {
    size_t count = 0;
    for (const Flat* flat : units_[unit].flats) count += flat->members().size();
    counts.push_back(count);
  }
  units.resize(layout::units_ahead(counts, tiers_->options.prefetch));
  return units;
}

// Few units are handed to the device before the first of them is computed. A thread that is further
// ahead fills the queue of launches, and waits there with a lock that whoever copies needs too.
void ShardEngine::stay_near() {
  constexpr size_t kUnits = 4;
  handed_over_.push_back(memory::computed(tiers_->device));
  if (handed_over_.size() <= kUnits) return;
  handed_over_.front().wait();
  handed_over_.pop_front();
}

void ShardEngine::use(size_t index, const std::set<size_t>& held) {
  const Phase phase = current_phase();
  const bool begins = order_.use(phase, index);
  current_ = index;
  units_[index].used_in_backward = phase == Phase::backward;
  std::set<size_t> wanted{index};
  std::vector<size_t> next;
  const Prefetch prefetch = prefetch_in(phase);
  if (begins) {
    for (const Flat* flat : units_[index].flats) flat->check_sealed();
    if (tiers_) stay_near();
    const bool evaluating = evaluates(phase);
    // A unit that comes a second time begins the next pass.
    if (evaluating && !evaluated_.insert(index).second) evaluated_ = {index};
    if (prefetch != Prefetch::none) {
      next = ahead();
      // Nothing is fetched for a pass that may not come.
      if (evaluating) std::erase_if(next, [&](size_t unit) { return evaluated_.contains(unit); });
      wanted.insert(next.begin(), next.end());
    }
    for (size_t other = 0; other < units_.size(); ++other) {
      Unit& unit = units_[other];
      if (wanted.contains(other) || held.contains(other) || !may_release(unit, phase)) continue;
      const bool on_its_way = std::any_of(unit.flats.begin(), unit.flats.end(), [](Flat* flat) {
        return flat->state() == ParameterState::gathering;
      });
      if (options_.limit_all_gathers || !on_its_way) release(unit);
    }
  }
  for (Flat* flat : units_[index].flats) gather(*flat);
  if (begins && prefetch == Prefetch::pre) fetch_ahead(next);
}

void ShardEngine::before_operator(std::span<const size_t> flats) {
  if (replaced_ != nullptr && !replaced_->tensor.key_set().has(kShardKey)) check_replaced();
  if (window_) begin_epoch();
  if (current_phase() == Phase::backward) {
    // The first operator of a backward is in its outermost graph; gradients may come from inner
    // ones.
    const auto* wanted = torch::autograd::get_current_graph_task_exec_info();
    if (wanted->empty()) {
      const std::lock_guard lock(mutex_);
      begin_round();
    }
  }
  std::set<size_t>& held = held_;
  held.clear();
  for (const size_t flat : flats) held.insert(unit_of_[flat]);
  for (const size_t flat : flats) {
    if (flats_[flat]->plan().resident) {
      gather(*flats_[flat]);
    } else {
      use(unit_of_[flat], held);
    }
  }
}

// After an operator in eval mode.
void ShardEngine::release_used() {
  const bool over = order_.visit_may_be_over();
  for (const size_t unit : held_) {
    if ((unit != current_ || over) && !is_kept(units_[unit])) release(units_[unit]);
  }
  if (!over || options_.forward_prefetch != Prefetch::post) return;
  auto next = order_.ahead(options_.prefetch_depth);
  std::erase_if(next, [&](size_t unit) { return evaluated_.contains(unit); });
  fetch_ahead(next);
}

void ShardEngine::after_operator() {
  if (drops_always_) return release_all();
  if (current_ == SIZE_MAX) return;
  const Phase phase = current_phase();
  if (evaluates(phase)) return release_used();
  if (!order_.visit_is_over()) return;
  const bool post = prefetch_in(phase) == Prefetch::post;
  if (!post && phase != Phase::no_grad) return;
  const auto ahead = order_.ahead(post ? options_.prefetch_depth : 1);
  Unit& unit = units_[current_];
  if (may_release(unit, phase) && !order_.stays()) release(unit);
  if (post) fetch_ahead(ahead);
}

// A parameter that was replaced stays an error: also for a caller who catches the first one.
void ShardEngine::check_replaced() {
  if (replaced_ == nullptr) return;
  if (!replaced_->tensor.key_set().has(kShardKey)) {
    for (const auto& flat : flats_) flat->check_members();  // says which one it is
  }
  replaced_ = nullptr;
}

void ShardEngine::on_replacement(const Tag& tag, const at::Tensor& view) {
  check_replaced();
  const std::string& name = tag.name_of(view);
  for (const Member& member : flats_[tag.flat]->members()) {
    if (member.name == name) replaced_ = &member;
  }
}

void ShardEngine::on_zero(const Tag& tag, const at::Tensor& view) {
  Flat& flat = *flats_[tag.flat];
  if (tag.kind != Tag::Kind::gradient) return flat.zero_unreduced(view);
  for (size_t i = 0; i < flat.members().size(); ++i) {
    if (flat.members()[i].name == tag.name_of(view)) flat.zero_gradient(i);
  }
}

// ---- users ----

void ShardEngine::pin(const std::string& name, bool waits) {
  const auto fetch = [&](Flat& flat) { waits ? gather(flat) : flat.prefetch(); };
  if (window_) begin_epoch();
  bool found = false;
  for (Unit& unit : units_) {
    if (!name.empty() && unit.name != name) continue;
    found = true;
    ++unit.pins;
    for (Flat* flat : unit.flats) fetch(*flat);
  }
  for (const auto& flat : flats_) {
    if (flat->plan().resident && (name.empty() || flat->plan().unit == name)) fetch(*flat);
  }
  if (!found) {
    throw ConfigError(
        format("[fully_shard] there is no unit '{}'; the units are {}", name, join(unit_names())));
  }
}

void ShardEngine::unpin(const std::string& name) {
  for (Unit& unit : units_) {
    if ((!name.empty() && unit.name != name) || unit.pins == 0) continue;
    --unit.pins;
    if (!is_kept(unit)) release(unit);
  }
}

std::vector<std::string> ShardEngine::unit_names() const {
  std::vector<std::string> names;
  for (const Unit& unit : units_) names.push_back(unit.name);
  return names;
}

const Flat* ShardEngine::find(const std::string& name, const Member** member) const {
  for (const auto& flat : flats_) {
    for (const Member& each : flat->members()) {
      if (each.name != name) continue;
      *member = &each;
      return flat.get();
    }
  }
  return nullptr;
}

size_t ShardEngine::current_bytes() const {
  size_t bytes = gather_memory_->used() + gradient_memory_->occupied();
  for (const auto& flat : flats_) bytes += flat->parameter_bytes() + flat->gradient_bytes();
  return bytes;
}

void ShardEngine::note_bytes() { peak_bytes_ = std::max(peak_bytes_, current_bytes()); }

}  // namespace lockstep::parallel::detail
