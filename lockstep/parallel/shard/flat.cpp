// SPDX-License-Identifier: Apache-2.0
#include "lockstep/parallel/shard/flat.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "lockstep/comm/collectives.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/trace.h"
#include "lockstep/parallel/intercept/recording.h"

namespace lockstep::parallel::detail {
namespace {

at::TensorOptions options_of(at::ScalarType dtype, c10::Device device) {
  return at::TensorOptions().dtype(dtype).device(device);
}

// So that every parameter begins where torch would begin a tensor of its own.
int64_t alignment(const FlatPlan& plan) {
  constexpr size_t kBytes = 64;
  const size_t smallest =
      std::min({c10::elementSize(plan.gather_dtype), c10::elementSize(plan.compute_dtype),
                c10::elementSize(plan.reduce_dtype)});
  return static_cast<int64_t>(kBytes / smallest);
}

// Lines outlive the mode that is on when they are first needed: none is an inference tensor.
struct OwnMode {
  c10::InferenceMode normal{false};
  at::NoGradGuard no_grad = {};
};

std::shared_ptr<void> keep(const at::Tensor& tensor) {
  return std::make_shared<at::Tensor>(tensor);
}

}  // namespace

layout::FlatLayout lay_out(const FlatPlan& plan) {
  std::vector<layout::Shape> shapes;
  for (const UnitParameter& parameter : plan.parameters)
    shapes.push_back(parameter.tensor.sizes().vec());
  return layout::lay_out(shapes, plan.shard.size(), alignment(plan));
}

layout::Shape Member::shard_shape() const {
  if (shape.empty()) return rows.empty() ? layout::Shape{0} : layout::Shape{};
  layout::Shape sizes = shape;
  sizes[0] = rows.size();
  return sizes;
}

Flat::Flat(FlatPlan plan, FlatContext context, size_t index, const ValueOf& value_of)
    : plan_(std::move(plan)), context_(std::move(context)), index_(index) {
  const at::NoGradGuard no_grad;
  make_members();
  const bool as_is = plan_.shard.size() == 1 && plan_.rest_device == plan_.device &&
                     plan_.compute_dtype == plan_.dtype;
  plain_ = as_is && !plan_.offload;
  in_place_ = as_is && plan_.offload && plan_.offload->params == layout::Tier::device;
  filled_.assign(members_.size(), false);
  versions_.resize(members_.size());
  if (plain_) {
    for (const UnitParameter& parameter : plan_.parameters) {
      const at::Tensor value = value_of(parameter);
      if (!value.is_same(parameter.tensor)) give_memory(parameter.tensor, value);
    }
  } else {
    make_shard(value_of);
    tag_shard();
    attach_parameters();
  }
  make_optimized();
}

void Flat::make_members() {
  layout_ = lay_out(plan_);
  names_ = std::make_shared<FlatNames>();
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

layout::Range Flat::block() const {
  return layout_.blocks[static_cast<size_t>(plan_.shard.rank())];
}

at::Tensor Flat::shared_memory(int64_t count, at::ScalarType dtype) {
  if (plan_.offload) {
    const OffloadTiers& tiers = *plan_.offload->tiers;
    if (plan_.shard.size() == 1)
      return tiers.resting(plan_.offload->params, count, dtype, "parameters of " + plan_.name);
    const size_t bytes = static_cast<size_t>(count) * c10::elementSize(dtype);
    const bool device = plan_.offload->params == layout::Tier::device;
    shares_.push_back((device ? tiers.device_budget : tiers.host_budget)
                          .take(bytes, "parameters of " + plan_.name));
  }
  if (count == 0 || plan_.shard.size() == 1)
    return at::empty({count}, options_of(dtype, plan_.rest_device));
  const std::array<int64_t, 1> bytes{count * static_cast<int64_t>(c10::elementSize(dtype))};
  return comm::symmetric_empty(bytes, DType::uint8, plan_.shard, plan_.rest_device).view(dtype);
}

void Flat::make_shard(const ValueOf& value_of) {
  const int64_t count = block().size();
  if (plan_.resident && plan_.shard.size() > 1) {
    // Everybody has all of it: what this rank sends is a part of that.
    arriving_ = shared_memory(layout_.size, plan_.gather_dtype);
    sent_ = arriving_.narrow(0, block().begin, count);
  } else {
    sent_ = shared_memory(count, plan_.gather_dtype);
  }
  shard_ = plan_.dtype == plan_.gather_dtype ? sent_
           : plan_.offload                   ? shared_memory(count, plan_.dtype)
                           : at::empty({count}, options_of(plan_.dtype, plan_.rest_device));
  shard_.zero_();
  for (size_t i = 0; i < members_.size(); ++i) {
    const Member& member = members_[i];
    const at::Tensor value = value_of(plan_.parameters[i]);
    if (member.shard_numel() == 0) continue;
    shard_.narrow(0, member.shard_offset, member.shard_numel())
        .copy_(value.detach().reshape({-1}).narrow(0, member.rows.begin * member.row_size,
                                                   member.shard_numel()));
  }
  if (plan_.shard.size() > 1 && plan_.rest_device.is_cpu())
    peers_ = comm::PeerMemory::open(sent_, plan_.shard);
  if (peers_) make_pieces();
}

Tag Flat::tag(Tag::Kind kind, std::shared_ptr<void> memory) const {
  return {.kind = kind,
          .engine = context_.engine,
          .flat = index_,
          .names = names_,
          .memory = std::move(memory)};
}

void Flat::make_optimized() {
  if (!plan_.trained) return;
  if (plain_) {
    for (size_t i = 0; i < members_.size(); ++i)
      optimized_.push_back({members_[i].name, members_[i].tensor, {0, 0}, i, i + 1, {}});
    return;
  }
  if (shard_.numel() == 0) return;
  Tag unreduced_tag = tag(Tag::Kind::unreduced, nullptr);
  unreduced_tag.names = shard_names_;
  const c10::Storage unreduced =
      make_storage(nowhere_.data(), shard_.nbytes(), shard_.device(), std::move(unreduced_tag));
  const auto add = [&](const std::string& name, const layout::Shape& shape, int64_t begin,
                       size_t first, size_t end) {
    at::Tensor tensor = tagged_tensor(shard_storage_, shard_.scalar_type(), shape, begin);
    tensor.set_requires_grad(true);
    optimized_.push_back({name,
                          tensor,
                          {begin, begin + tensor.numel()},
                          first,
                          end,
                          tagged_tensor(unreduced, shard_.scalar_type(), shape, begin)});
  };
  if (!context_.options->use_orig_params) {
    return add(plan_.name, {shard_.numel()}, 0, 0, members_.size());
  }
  for (size_t i = 0; i < members_.size(); ++i) {
    const Member& member = members_[i];
    if (member.shard_numel() > 0)
      add(member.name, member.shard_shape(), member.shard_offset, i, i + 1);
  }
}

void Flat::attach_parameters() {
  const c10::impl::ExcludeDispatchKeyGuard unseen(kShardKey);
  const size_t bytes = static_cast<size_t>(layout_.size) * c10::elementSize(plan_.compute_dtype);
  if (plan_.device.is_cpu()) nowhere_ = {bytes, memory::AddressRange::Access::none};
  storage_ = make_storage(nowhere_.data(), bytes, plan_.device, tag(Tag::Kind::parameter, nullptr));
  const c10::Storage gradient_storage =
      make_storage(nowhere_.data(), bytes, plan_.device, tag(Tag::Kind::gradient, nullptr));
  for (Member& member : members_) {
    const at::Tensor view =
        tagged_tensor(storage_, plan_.compute_dtype, member.shape, member.offset);
    if (member.tensor.is_meta()) {
      give_memory(member.tensor, view);
    } else {
      member.tensor.mutable_grad().reset();
      member.tensor.set_data(view);
    }
    stand_ins_.push_back(
        tagged_tensor(gradient_storage, plan_.compute_dtype, member.shape, member.offset));
  }
  if (!in_place_) return;
  line_ = shard_;
  point_to(line_);
  state_ = ParameterState::gathered;
  stale_ = false;
}

void Flat::check_members() const {
  if (plain_) return;
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

std::vector<UnitParameter> Flat::optimized() const {
  std::vector<UnitParameter> all;
  for (const Optimized& each : optimized_) all.push_back({each.name, each.tensor});
  return all;
}

layout::Placement Flat::placement(const Member& member) const {
  layout::Placement placement = layout::Placement::whole(member.name, member.shape);
  if (plan_.shard.size() == 1) return placement;
  return placement.narrow(0, member.rows, "shard");
}

at::Tensor Flat::buffer(at::ScalarType dtype, c10::Device device) const {
  if (plan_.offload && device == plan_.device)
    return plan_.offload->tiers->parameters_on_device(layout_.size, dtype, plan_.name,
                                                      memory::Stay::short_time);
  const size_t bytes = static_cast<size_t>(layout_.size) * c10::elementSize(dtype);
  const std::shared_ptr<void> memory = context_.gather_memory->take(bytes, device);
  return at::from_blob(
      memory.get(), {layout_.size}, [memory](void*) {}, options_of(dtype, device));
}

void Flat::make_pieces() {
  constexpr int64_t kBytes = int64_t{1} << 20;
  const auto most = kBytes / static_cast<int64_t>(sent_.element_size());
  for (int step = 0; step < plan_.shard.size(); ++step) {
    const int rank = (plan_.shard.rank() + step) % plan_.shard.size();  // each begins elsewhere
    if (step == 0 && plan_.resident) continue;                          // in place
    const layout::Range range = layout_.blocks[static_cast<size_t>(rank)];
    for (int64_t begin = range.begin; begin < range.end; begin += most) {
      pieces_.push_back({rank, begin - range.begin, begin, std::min(most, range.end - begin)});
    }
  }
}

void Flat::copy_piece(const at::Tensor& line, const Piece& piece) const {
  const auto size = static_cast<int64_t>(line.element_size());
  std::memcpy(static_cast<std::byte*>(line.data_ptr()) + piece.target * size,
              peers_->of(piece.rank) + piece.source * size,
              static_cast<size_t>(piece.count * size));
}

void Flat::copy_piece_by_all(const at::Tensor& line, const Piece& piece) const {
  const auto size = static_cast<int64_t>(line.element_size());
  // Only ever read; torch has no tensors of constant memory.
  auto* const source = const_cast<std::byte*>(peers_->of(piece.rank)) + piece.source * size;
  line.narrow(0, piece.target, piece.count)
      .copy_(at::from_blob(source, {piece.count}, line.options()));
}

void Flat::finish_pulling(const at::Tensor& line) {
  const trace::Span span("shard", "gather " + plan_.name);
  const auto copy = [&](size_t piece) { copy_piece_by_all(line, pieces_[piece]); };
  if (pulling_.valid()) return pulling_.finish(copy);
  for (size_t piece = 0; piece < pieces_.size(); ++piece) copy(piece);
}

// Where a line arrives is where it is used, unless the model has another type or device.
void Flat::begin(bool beside_computation) {
  const OwnMode mode;
  const bool same = plan_.gather_dtype == plan_.compute_dtype && plan_.rest_device == plan_.device;
  const bool has_line = plan_.resident && line_.defined();
  if (comes_from_host()) return fetch();
  if (kept_is_valid_ || plan_.shard.size() == 1) {
    if (!has_line) line_ = buffer(plan_.compute_dtype, plan_.device);
    state_ = ParameterState::gathering;
    return;  // a local copy, made by whoever needs it
  }
  if (!plan_.resident) arriving_ = buffer(plan_.gather_dtype, plan_.rest_device);
  if (!has_line) line_ = same ? arriving_ : buffer(plan_.compute_dtype, plan_.device);
  if (plan_.offload && plan_.offload->params == layout::Tier::host)
    plan_.offload->tiers->traffic.to_device += static_cast<int64_t>(line_.nbytes());
  if (!peers_) {
    gathering_ = comm::all_gather(arriving_, sent_, plan_.shard,
                                  {.counts = layout_.counts(), .tag = plan_.name});
  } else if (beside_computation) {
    pulling_ = context_.copy_thread->start(pieces_.size(), [this, line = arriving_](size_t piece) {
      copy_piece(line, pieces_[piece]);
    });
  } else {
    finish_pulling(arriving_);
  }
  state_ = ParameterState::gathering;
}

// What could not be gathered is not here.
void Flat::wait_gathered() {
  try {
    if (pulling_.valid()) finish_pulling(arriving_);
    memory::compute_after(std::exchange(fetched_, {}), plan_.device);
    std::exchange(gathering_, {}).wait();
  } catch (...) {
    line_.reset();
    if (!plan_.resident) arriving_.reset();
    state_ = ParameterState::sharded;
    throw;
  }
}

void Flat::prefetch() {
  const bool idle = plan_.resident ? stale_ && state_ != ParameterState::gathering
                                   : state_ == ParameterState::sharded;
  if (!plain_ && idle && has_room()) begin(true);
}

bool Flat::gather() {
  if (in_place_) {
    wait_updated();
    return false;
  }
  if (plain_ || (state_ == ParameterState::gathered && !stale_)) return false;
  const at::NoGradGuard no_grad;
  if (state_ != ParameterState::gathering) begin(false);
  wait_gathered();
  if (kept_is_valid_) {
    line_.copy_(kept_);
  } else if (plan_.shard.size() == 1 && !comes_from_host()) {
    wait_updated();
    line_.copy_(shard_);
  } else if (plan_.shard.size() > 1 && !arriving_.is_same(line_)) {
    line_.copy_(arriving_);
  }
  if (!plan_.resident) arriving_.reset();
  point_to(line_);
  state_ = ParameterState::gathered;
  stale_ = false;
  return true;
}

void Flat::point_to(const at::Tensor& line) {
  repoint(storage_, line.data_ptr(), plan_.device, tag(Tag::Kind::parameter, keep(line)));
}

void Flat::point_nowhere() {
  repoint(storage_, nowhere_.data(), plan_.device, tag(Tag::Kind::parameter, nullptr));
}

void Flat::release() {
  if (plain_ || in_place_ || plan_.resident || state_ == ParameterState::sharded) return;
  // Nobody wants it any more, but it is being written.
  if (state_ == ParameterState::gathering) wait_gathered();
  const bool gathered = state_ == ParameterState::gathered;
  state_ = ParameterState::resharding;
  if (gathered && context_.options->offload_to_cpu && !kept_is_valid_ && !stale_) {
    const OwnMode mode;
    if (!kept_.defined()) kept_ = at::empty_like(line_, line_.options().device(at::kCPU));
    kept_.copy_(line_);
    kept_is_valid_ = true;
  }
  if (gathered) point_nowhere();
  line_.reset();
  arriving_.reset();
  state_ = ParameterState::sharded;
}

size_t Flat::parameter_bytes() const {
  if (plain_) {
    size_t bytes = 0;
    for (const Member& member : members_) bytes += member.tensor.nbytes();
    return bytes;
  }
  size_t bytes = shard_.nbytes();
  if (plan_.resident && arriving_.defined()) {
    bytes = arriving_.nbytes() + (sent_.is_same(shard_) ? 0 : shard_.nbytes());
  } else if (!sent_.is_same(shard_)) {
    bytes += sent_.nbytes();
  }
  return bytes;
}

}  // namespace lockstep::parallel::detail
