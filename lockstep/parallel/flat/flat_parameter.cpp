// SPDX-License-Identifier: Apache-2.0
#include "lockstep/parallel/flat/flat_parameter.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/memory/arena.h"
#include "lockstep/parallel/intercept/fault_report.h"
#include "lockstep/parallel/intercept/recording.h"

namespace lockstep::parallel::detail {
namespace {

// In elements, of every type that the line has.
int64_t alignment(const FlatPlan& plan) {
  const size_t smallest =
      std::min({c10::elementSize(plan.gather_dtype), c10::elementSize(plan.compute_dtype),
                c10::elementSize(plan.reduce_dtype)});
  return layout::kFlatAlignment / static_cast<int64_t>(smallest);
}

int world_rank(const FlatPlan& plan) {
  return plan.shard.members()[static_cast<size_t>(plan.shard.rank())];
}

}  // namespace

layout::FlatLayout lay_out(const FlatPlan& plan) {
  std::vector<layout::Shape> shapes;
  for (const auto& parameter : plan.parameters) shapes.push_back(parameter.tensor.sizes().vec());
  return layout::lay_out(shapes, plan.owners, plan.shard.size(), alignment(plan));
}

layout::Shape Member::shard_shape() const {
  if (shape.empty()) return rows.empty() ? layout::Shape{0} : layout::Shape{};
  layout::Shape sizes = shape;
  sizes[0] = rows.size();
  return sizes;
}

FlatParameter::FlatParameter(FlatPlan plan, std::weak_ptr<ShardEngine> engine, size_t index)
    : plan_(std::move(plan)),
      engine_(std::move(engine)),
      index_(index),
      layout_(lay_out(plan_)),
      names_(std::make_shared<FlatNames>()) {
  for (size_t i = 0; i < plan_.parameters.size(); ++i) {
    Member member{.name = plan_.parameters[i].name,
                  .tensor = plan_.parameters[i].tensor,
                  .shape = plan_.parameters[i].tensor.sizes().vec(),
                  .offset = layout_.offsets[i]};
    if (!member.shape.empty() && member.shape[0] > 0)
      member.row_size = member.numel() / member.shape[0];
    names_->names.push_back(member.name);
    names_->bytes.push_back(member.offset *
                            static_cast<int64_t>(c10::elementSize(plan_.compute_dtype)));
    members_.push_back(std::move(member));
  }
  for (const auto& [tensor, rows] : layout_.rows[static_cast<size_t>(plan_.shard.rank())]) {
    Member& member = members_[static_cast<size_t>(tensor)];
    member.rows = rows;
    member.shard_offset = member.offset + rows.begin * member.row_size - block().begin;
  }
}

layout::Placement FlatParameter::placement(const Member& member) const {
  layout::Placement placement = layout::Placement::whole(member.name, member.shape);
  if (plan_.shard.size() == 1) return placement;
  return placement.narrow(0, member.rows, "shard");
}

Tag FlatParameter::tag(Tag::Kind kind, std::shared_ptr<void> memory) const {
  return {.kind = kind,
          .engine = engine_,
          .flat = index_,
          .names = names_,
          .memory = std::move(memory)};
}

// Addresses without memory. The storage that has them keeps them.
struct FlatParameter::Nowhere {
  memory::AddressRange range;
  FaultReport report;
};

std::shared_ptr<FlatParameter::Nowhere> FlatParameter::make_nowhere(
    Tag::Kind kind, size_t bytes, std::shared_ptr<const FlatNames> names) const {
  auto made = std::make_shared<Nowhere>();
  made->range = {bytes, memory::AddressRange::Access::none};
  const std::string of_unit = format(" of unit {}", plan_.unit);
  FaultReport::Text text{.before = format("lockstep error: rank {}: ", world_rank(plan_)),
                         .names = std::move(names),
                         .after = {}};
  if (kind == Tag::Kind::parameter) {
    text.before += "the program reads or writes the memory of parameter ";
    text.after = of_unit +
                 ", whose values are not gathered. data_ptr(), accessors, torch::save and kernels "
                 "of your own need summon() of what fully_shard returned; lockstep::checkpoint "
                 "saves a sharded model (docs/sharding.md)\n";
  } else {
    text.before += "the program reads or writes the memory of the gradient of parameter ";
    text.after =
        of_unit + (kind == Tag::Kind::gradient
                       ? ", which has gone into the shards. Use the gradients of the parameters() "
                         "of what fully_shard returned (docs/sharding.md)\n"
                       : ", but the last backward was under no_sync() and reduced nothing. Run one "
                         "without it first (docs/sharding.md)\n");
  }
  made->report = {made->range.data(), made->range.size(), std::move(text)};
  return made;
}

c10::Storage FlatParameter::empty_storage(Tag::Kind kind, size_t bytes, c10::Device device,
                                          std::shared_ptr<const FlatNames> names) const {
  if (!names) names = names_;
  const auto nowhere = device.is_cpu() ? make_nowhere(kind, bytes, names) : nullptr;
  Tag made = tag(kind, nowhere);
  made.names = std::move(names);
  return make_storage(nowhere ? nowhere->range.data() : nullptr, bytes, device, std::move(made));
}

void FlatParameter::make_views() {
  const c10::impl::ExcludeDispatchKeyGuard unseen(kShardKey);
  const size_t bytes = static_cast<size_t>(layout_.size) * c10::elementSize(plan_.compute_dtype);
  if (plan_.device.is_cpu()) nowhere_ = make_nowhere(Tag::Kind::parameter, bytes, names_);
  storage_ = make_storage(nowhere_data(), bytes, plan_.device, tag(Tag::Kind::parameter, nowhere_));
  for (const Member& member : members_) {
    const at::Tensor view =
        tagged_tensor(storage_, plan_.compute_dtype, member.shape, member.offset);
    if (member.tensor.is_meta()) {
      give_memory(member.tensor, view);
    } else {
      member.tensor.mutable_grad().reset();
      member.tensor.set_data(view);
    }
  }
}

void* FlatParameter::nowhere_data() const { return nowhere_ ? nowhere_->range.data() : nullptr; }

void FlatParameter::show(const at::Tensor& line) {
  line_ = line;
  repoint(storage_, line.data_ptr(), plan_.device,
          tag(Tag::Kind::parameter, std::make_shared<at::Tensor>(line)));
}

void FlatParameter::hide() {
  if (!line_.defined()) return;
  line_.reset();
  repoint(storage_, nowhere_data(), plan_.device, tag(Tag::Kind::parameter, nowhere_));
}

void FlatParameter::leave(std::shared_ptr<const LeftShard> left) {
  const std::shared_ptr<void> memory =
      line_.defined() ? std::shared_ptr<void>(std::make_shared<at::Tensor>(line_)) : nowhere_;
  Tag last = tag(Tag::Kind::parameter, memory);
  last.left = std::move(left);
  repoint(storage_, line_.defined() ? line_.data_ptr() : nowhere_data(), plan_.device,
          std::move(last));
}

void FlatParameter::outdate() const {
  if (!storage_) return;
  for (const Member& member : members_) member.tensor.unsafeGetTensorImpl()->bump_version();
}

void FlatParameter::check_views() const {
  if (!storage_) return;
  for (const Member& member : members_) {
    const bool same =
        member.tensor.has_storage() &&
        member.tensor.storage().unsafeGetStorageImpl() == storage_.unsafeGetStorageImpl() &&
        member.tensor.storage_offset() == member.offset &&
        member.tensor.sizes() == at::IntArrayRef(member.shape) &&
        member.tensor.key_set().has(kShardKey);
    if (same) continue;
    throw Error(format(
        "[fully_shard] parameter {} is ({}) {} on {} and no longer part of its unit, where it "
        "is ({}) {} on {}; a sharded model must not be moved or converted, and its "
        "parameters not be replaced (model->to(), set_data())",
        member.name, join(member.tensor.sizes()), c10::toString(member.tensor.scalar_type()),
        member.tensor.device().str(), join(member.shape), c10::toString(plan_.compute_dtype),
        plan_.device.str()));
  }
}

}  // namespace lockstep::parallel::detail
