// SPDX-License-Identifier: Apache-2.0
#include "lockstep/parallel/shard/engine.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/control/missing_peer.h"
#include "lockstep/core/error.h"

namespace lockstep::parallel::detail {
namespace {

// What gathered parameters take on the device. Parameters that are the model's own take nothing.
int64_t gathered_bytes(const ShardEngine& engine) {
  int64_t bytes = 0;
  for (const auto& flat : engine.flats()) {
    if (!flat->plan().is_in_place()) bytes += static_cast<int64_t>(flat->gathered_bytes());
  }
  return bytes;
}

// Whether the budgets of offload hold what is not gathered yet. Codes on their way to the device
// take at most as much as the largest flat.
bool has_room(const ShardEngine& engine) {
  if (!engine.tiers()) return true;
  const OffloadTiers& tiers = *engine.tiers();
  size_t missing = 0, largest = 0;
  for (const auto& flat : engine.flats()) {
    if (flat->residence->state() != ParameterState::sharded) continue;
    const size_t bytes = tiers.device_memory.rounded(flat->gathered_bytes());
    missing += bytes;
    if (flat->plan().is_encoded()) largest = std::max(largest, bytes);
  }
  return tiers.param_budget.fits(missing) && tiers.device_memory.fits(missing + largest);
}

}  // namespace

ShardEngine::ShardEngine(ShardGroups groups, FullyShardOptions options,
                         std::weak_ptr<const torch::nn::Module> model)
    : groups_(std::move(groups)),
      options_(std::move(options)),
      units_(options_, std::move(model), [this] { note_bytes(); }),
      window_(groups_.shard, flats_, units_),
      gradients_(
          groups_.all, options_, flats_,
          {.opens =
               [this] {
                 if (window_.is_summoned_to_write() && tiers_ && tiers_->updates_in_backward()) {
                   throw Error(
                       "[fully_shard] a backward that updates parameters (clip_mode none) "
                       "runs under a summon with write_back, whose end writes all shards; "
                       "end the summon first");
                 }
                 check_replaced();
               },
           // A rank that ends its backward must find that no peer reads its shards any more.
           .ends = [this] { units_.end_pass(); },
           .reduced =
               [this] {
                 note_bytes();
                 window_.open_after_backward();
               },
           .memory_changed = [this] { note_bytes(); }}),
      copy_thread_(groups_.all.members()[static_cast<size_t>(groups_.all.rank())]) {}

ShardEngine::~ShardEngine() {
  if (tiers_) tiers_->wait();  // for what is on its way into lines that go now
  for (const auto& flat : flats_) flat->shard.leave();
}

void ShardEngine::start(std::vector<FlatPlan> plans, const FlatShard::ValueOf& value_of,
                        std::shared_ptr<OffloadTiers> tiers) {
  tiers_ = std::move(tiers);
  units_.set_tiers(tiers_);
  size_t capacity = 0;
  c10::Device device = at::kCPU;
  for (const FlatPlan& plan : plans) {
    for (const auto& parameter : plan.parameters) {
      // In two types at most, with padding; and the gradients of shards on their way.
      capacity += 3 * (static_cast<size_t>(parameter.tensor.numel()) * 8 + 64);
    }
    device = plan.device;
  }
  environment_.reset(new FlatEnvironment{.gather_memory = {capacity + 4096, device},
                                         .gradient_memory = {groups_.reduce, device, tiers_},
                                         .copy_thread = copy_thread_,
                                         .evict = [this] { units_.evict(); },
                                         .observe = options_.advanced.observe});
  size_t line_bytes = 0, gradient_bytes = 0;
  for (FlatPlan& given : plans) {
    flats_.push_back(std::make_unique<Flat>(std::move(given), weak_from_this(), flats_.size(),
                                            *environment_, value_of));
    Flat& flat = *flats_.back();
    units_.add(flat);
    const auto bytes = [&](at::ScalarType dtype) {
      return static_cast<size_t>(flat.parameter.layout().size) * c10::elementSize(dtype);
    };
    const FlatPlan& plan = flat.plan();
    if (!flat.plan().is_own() && !plan.resident)
      line_bytes = std::max(line_bytes, bytes(plan.compute_dtype));
    if (!flat.gradients->keeps_line())
      gradient_bytes = std::max(gradient_bytes, bytes(plan.reduce_dtype));
  }
  environment_->gather_memory.expect(line_bytes);
  environment_->gradient_memory.expect(gradient_bytes);
  if (tiers_) environment_->gradient_memory.reserve();  // before lines come and go
  window_.start(*environment_, tiers_);
  gradients_.start(*environment_,
                   std::shared_ptr<GradientReduction>(shared_from_this(), &gradients_));
  note_bytes();
}

void ShardEngine::before_operator(std::span<const size_t> flats) {
  if (replaced_ != nullptr && !replaced_->tensor.key_set().has(kShardKey)) check_replaced();
  if (tiers_) tiers_->activations.resume();
  comm::with_peer_hint(kUseByAllRanks, [this] { window_.close_before_use(); });
  // The first operator of a backward is in its outermost graph; gradients may come from inner ones.
  const auto* const wanted = torch::autograd::get_current_graph_task_exec_info();
  if (wanted != nullptr && wanted->empty()) gradients_.begin_backward();
  comm::with_peer_hint(kUseByAllRanks, [&] { units_.before_operator(flats); });
}

// A parameter that was replaced stays an error: also for a caller who catches the first one.
void ShardEngine::check_replaced() {
  if (replaced_ == nullptr) return;
  if (!replaced_->tensor.key_set().has(kShardKey)) {
    for (const auto& flat : flats_) flat->parameter.check_views();  // says which one it is
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

void ShardEngine::pin(const std::string& unit, bool waits) {
  window_.close_before_use();
  units_.pin(unit, waits);
}

size_t ShardEngine::current_bytes() const {
  size_t bytes = environment_->gather_memory.used() + environment_->gradient_memory.occupied();
  for (const auto& flat : flats_) bytes += flat->shard.bytes() + flat->gradients->bytes();
  return bytes;
}

bool hold(std::span<const std::shared_ptr<ShardEngine>> engines, int64_t budget,
          const comm::Group& group) {
  int64_t bytes = 0;
  bool fits = true;
  for (const auto& engine : engines) {
    engine->units().end_pass();
    bytes += gathered_bytes(*engine);
    fits = fits && has_room(*engine);
  }
  const at::Tensor all_fit = at::full({1}, fits && bytes <= budget ? 1 : 0, at::kLong);
  comm::all_reduce(all_fit, group, {.op = comm::ReduceOp::min, .tag = "room to hold parameters"})
      .wait();
  if (all_fit.item<int64_t>() == 0) return false;
  for (const auto& engine : engines) engine->pin("");
  return true;
}

}  // namespace lockstep::parallel::detail
