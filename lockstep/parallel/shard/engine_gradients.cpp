// SPDX-License-Identifier: Apache-2.0
// The engine's backward: when gradients arrive, when they are reduced, and how ranks stay together.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

#include "lockstep/comm/collectives.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/log.h"
#include "lockstep/core/trace.h"
#include "lockstep/parallel/shard/engine.h"
#include "lockstep/parallel/tiers/tiers.h"

namespace lockstep::parallel::detail {

using torch::autograd::variable_list;

// Runs when a parameter's gradient has been accumulated. It may outlive the engine.
class ShardEngine::ArrivalHook final : public torch::autograd::FunctionPostHook {
 public:
  ArrivalHook(std::weak_ptr<ShardEngine> engine, size_t flat, size_t member)
      : engine_(std::move(engine)), flat_(flat), member_(member) {}
  variable_list operator()(const variable_list& outputs, const variable_list& gradients) override {
    // The engine also calls when there is nothing to accumulate; what is in grad() is older then.
    const bool arrived = gradients.empty() || gradients[0].defined();
    if (const auto engine = engine_.lock(); engine && arrived) engine->arrive(flat_, member_);
    return outputs;
  }

 private:
  std::weak_ptr<ShardEngine> engine_;
  size_t flat_, member_;
};

// Runs before it is accumulated.
class ShardEngine::AccumulationHook final : public torch::autograd::FunctionPreHook {
 public:
  AccumulationHook(std::weak_ptr<ShardEngine> engine, size_t flat, size_t member)
      : engine_(std::move(engine)), flat_(flat), member_(member) {}
  variable_list operator()(const variable_list& gradients) override {
    if (const auto engine = engine_.lock(); engine && gradients[0].defined()) {
      {
        const std::lock_guard lock(engine->mutex_);
        engine->begin_round();
      }
      const Flat& flat = *engine->flats_[flat_];
      flat.before_accumulation(flat.members()[member_]);
    }
    return gradients;
  }

 private:
  std::weak_ptr<ShardEngine> engine_;
  size_t flat_, member_;
};

void ShardEngine::install_hooks() {
  hooks_.resize(flats_.size());
  for (size_t f = 0; f < flats_.size(); ++f) {
    if (!flats_[f]->plan().trained) continue;
    for (size_t m = 0; m < flats_[f]->members().size(); ++m) {
      Hooks hooks{.accumulator =
                      torch::autograd::impl::grad_accumulator(flats_[f]->members()[m].tensor)};
      hooks.arrival =
          hooks.accumulator->add_post_hook(std::make_unique<ArrivalHook>(weak_from_this(), f, m));
      hooks.accumulator->add_pre_hook(std::make_unique<AccumulationHook>(weak_from_this(), f, m));
      hooks_[f].push_back(std::move(hooks));
    }
  }
}

bool ShardEngine::listens_to(const at::Tensor& parameter) {
  const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(parameter);
  return accumulator != nullptr &&
         std::any_of(accumulator->post_hooks().begin(), accumulator->post_hooks().end(),
                     [](const auto& hook) {
                       return dynamic_cast<const ArrivalHook*>(hook.get()) != nullptr;
                     });
}

ShardEngine::~ShardEngine() {
  if (tiers_) tiers_->wait();  // for what is on its way into lines that go now
  for (const auto& flat_hooks : hooks_) {
    for (const Hooks& hooks : flat_hooks) hooks.accumulator->del_post_hook(hooks.arrival);
  }
}

bool ShardEngine::syncs() const {
  return no_sync_ == 0 || options_.no_sync == NoSyncGradients::sharded;
}

void ShardEngine::open_round(bool in_backward) {
  if (writers_ > 0 && tiers_ && tiers_->updates_in_backward()) {
    throw Error(
        "[fully_shard] a backward that updates parameters (clip_mode none) runs under "
        "a summon with write_back, whose end writes all shards; end the summon first");
  }
  check_replaced();
  in_round_ = true;
  in_backward_ = in_backward;
  round_syncs_ = !in_backward || syncs();
  last_round_ = round_syncs_ && (!in_backward || no_sync_ == 0);
  num_launched_ = 0;
  late_ = false;
  arrival_order_.clear();
  for (size_t f = 0; f < flats_.size(); ++f) {
    flats_[f]->begin_round();
    for (size_t m = 0; m < arrived_[f].size(); ++m) {
      if (!flats_[f]->has_unreduced(m)) arrived_[f][m] = 0;  // dropped since
    }
  }
}

void ShardEngine::reduce_now() {
  if (options_.no_sync == NoSyncGradients::sharded) return;  // every backward did
  const std::lock_guard lock(mutex_);
  if (in_round_) abandon_round();
  open_round(false);
  end_round();
}

void ShardEngine::begin_round() {
  if (in_round_ && callback_.expired()) abandon_round();
  if (in_round_) return;
  open_round(true);
  // Dies with the graph that was to call it.
  const auto alive = std::make_shared<bool>();
  callback_ = alive;
  torch::autograd::Engine::get_default_engine().queue_callback([alive, weak = weak_from_this()] {
    if (const auto engine = weak.lock()) {
      const std::lock_guard lock(engine->mutex_);
      engine->end_round();
    }
  });
}

// A backward that threw never reached its end. Peers may be in the reductions that it began.
void ShardEngine::abandon_round() {
  for (const auto& flat : flats_) {
    try {
      flat->abandon();
    } catch (const std::exception& error) {
      log::warn(format("[fully_shard] rank {}: after a backward that failed: {}",
                       groups_.all.rank(), error.what()));
    }
  }
  under_way_.clear();
  for (auto& members : arrived_) std::fill(members.begin(), members.end(), 0);
  in_round_ = false;
}

void ShardEngine::arrive(size_t index, size_t member) {
  Flat& flat = *flats_[index];
  if (!flat.members()[member].tensor.grad().defined()) return;
  const std::lock_guard lock(mutex_);
  begin_round();
  arrived_[index][member] = 1;
  const auto launched = launch_order_.begin() + static_cast<int64_t>(num_launched_);
  if (std::find(launch_order_.begin(), launched, index) != launched) {
    late_ = true;  // all ranks hear of it at the end of the round
    flat.before_accumulation(flat.members()[member]);
    return;
  }
  flat.arrive(member, [this] { return make_room(); });
  note_bytes();
  if (!flat.is_complete()) return;
  arrival_order_.push_back(index);
  if (!round_syncs_) return flat.put_aside();
  launch_complete();
}

void ShardEngine::launch_complete() {
  while (num_launched_ < launch_order_.size() &&
         flats_[launch_order_[num_launched_]]->is_complete()) {
    launch(*flats_[launch_order_[num_launched_]]);
    ++num_launched_;
  }
}

void ShardEngine::launch(Flat& flat) {
  flat.launch([this] { return make_room(); }, {.index = micro_batch_, .is_new = in_backward_});
  under_way_.push_back(&flat);
  // Nobody else has a part in it: what follows can begin.
  if (flat.is_alone()) make_room();
  if (flat.reduces_to_shards()) {
    ++counts_.reduce_scatters;
  } else {
    ++counts_.all_reduces;
  }
  note_bytes();
}

// Ends the reduction that was begun first.
bool ShardEngine::make_room() {
  if (under_way_.empty()) return false;
  under_way_.front()->wait_reduced();
  under_way_.erase(under_way_.begin());
  return true;
}

void ShardEngine::end_round() {
  // Also after an exception: the next backward begins a new round.
  const std::unique_ptr<bool, void (*)(bool*)> end(&in_round_, [](bool* flag) { *flag = false; });
  const at::NoGradGuard no_grad;
  order_.end_pass();
  current_ = SIZE_MAX;
  // Whoever ends its backward must find that nobody reads its shards any more.
  release_all();
  if (round_syncs_) return reduce_round();
  for (const size_t index : launch_order_)
    flats_[index]->keep_for_later([this] { return make_room(); }, micro_batch_);
}

// A parameter that no optimizer has, and that has a gradient; null: there is none.
const Member* ShardEngine::find_unfrozen() const {
  for (const auto& flat : flats_) {
    if (flat->plan().trained) continue;
    for (const Member& member : flat->members()) {
      if (member.tensor.requires_grad() && member.tensor.grad().defined()) return &member;
    }
  }
  return nullptr;
}

// Parameters that are updated as one tensor are updated where one of them has no gradient, too. One
// that was frozen must not be.
static void require_not_frozen(const Flat& flat, std::span<const int64_t> num_ranks) {
  if (!flat.plan().trained || !flat.updates_as_one()) return;
  if (std::ranges::all_of(num_ranks, [](int64_t count) { return count == 0; })) return;
  for (size_t i = 0; i < num_ranks.size(); ++i) {
    const Member& member = flat.members()[i];
    if (num_ranks[i] > 0 || member.tensor.requires_grad()) continue;
    throw Error(
        format("[fully_shard] parameter {} was frozen after the model was sharded, but unit {} is "
               "updated as one tensor: decay and momentum would change it; freeze first, then "
               "shard, or set use_orig_params",
               member.name, flat.plan().unit));
  }
}

void ShardEngine::reduce_round() {
  const trace::Span span("shard", "finish gradients");
  const Member* const unfrozen = find_unfrozen();
  std::vector<int64_t> mine{late_ ? 1 : 0, unfrozen != nullptr ? 1 : 0};
  for (const auto& members : arrived_) mine.insert(mine.end(), members.begin(), members.end());
  for (auto& members : arrived_) std::fill(members.begin(), members.end(), 0);
  while (num_launched_ < launch_order_.size()) {
    launch(*flats_[launch_order_[num_launched_]]);
    ++num_launched_;
  }
  const at::Tensor totals = at::tensor(mine, at::kLong);
  comm::Work comparing =
      comm::all_reduce(totals, groups_.all, {.tag = "which gradients there are"});
  while (make_room()) {
  }
  comparing.wait();
  const int64_t* total = totals.data_ptr<int64_t>();
  if (*total++ > 0) {
    throw Error(
        "[fully_shard] a parameter got another gradient after its own was sent; a block that runs "
        "its own backward inside backward must not share parameters: use parallel::recompute");
  }
  if (*total++ > 0) {
    throw Error(format(
        "[fully_shard] parameter {} is trained, but was frozen when the model was sharded: its "
        "gradients are not averaged, and no optimizer has it; unfreeze first, then shard",
        unfrozen != nullptr ? unfrozen->name : "of another rank"));
  }
  const int64_t* members = total;
  for (const auto& flat : flats_) {
    require_not_frozen(*flat, {members, flat->members().size()});
    members += flat->members().size();
  }
  for (const auto& flat : flats_) {
    const size_t count = flat->members().size();
    flat->settle({total, count});
    total += count;
  }
  for (const auto& flat : flats_) flat->wait_gradients();
  note_bytes();
  open_window();
  ++backwards_;
  if (!learned_ && in_backward_) learn_launch_order();
}

// After the first backward: in the order in which gradients were complete on rank 0; those that
// were not, last. Where the first guess was wrong, gradients had to wait, in memory of their own.
void ShardEngine::learn_launch_order() {
  learned_ = true;
  std::vector<int64_t> order;
  const auto add = [&](size_t index) {
    if (std::find(order.begin(), order.end(), static_cast<int64_t>(index)) == order.end())
      order.push_back(static_cast<int64_t>(index));
  };
  for (const size_t index : arrival_order_) add(index);
  for (const size_t index : launch_order_) add(index);
  const at::Tensor agreed = at::tensor(order, at::kLong);
  comm::broadcast(agreed, groups_.all, {.tag = "order of gradients"}).wait();
  const int64_t* first = agreed.data_ptr<int64_t>();
  launch_order_.assign(first, first + agreed.numel());
  gradient_memory_->trim();
}

}  // namespace lockstep::parallel::detail
