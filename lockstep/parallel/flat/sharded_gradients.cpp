// SPDX-License-Identifier: Apache-2.0
#include "lockstep/parallel/flat/sharded_gradients.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>

namespace lockstep::parallel::detail {

ShardedGradients::ShardedGradients(FlatParameter& parameter, FlatShard& shard,
                                   FlatEnvironment& environment)
    : ShardedGradients(parameter, shard, environment, !parameter.plan().scatters()) {}

ShardedGradients::ShardedGradients(FlatParameter& parameter, FlatShard& shard,
                                   FlatEnvironment& environment, bool keeps_line)
    : GradientAccumulator(parameter, shard, environment, keeps_line) {
  const size_t bytes =
      static_cast<size_t>(parameter.layout().size) * c10::elementSize(plan_.compute_dtype);
  const c10::Storage whole = parameter.empty_storage(Tag::Kind::gradient, bytes, plan_.device);
  for (const Member& member : members())
    stand_ins_.push_back(tagged_tensor(whole, plan_.compute_dtype, member.shape, member.offset));
  if (shard.optimized().empty()) return;
  const at::Tensor& values = shard.values();
  const c10::Storage unreduced = parameter.empty_storage(Tag::Kind::unreduced, values.nbytes(),
                                                         values.device(), shard.names());
  for (const OptimizedTensor& each : shard.optimized()) {
    unreduced_.push_back(
        {tagged_tensor(unreduced, values.scalar_type(), each.tensor.sizes(), each.range.begin)});
  }
}

bool ShardedGradients::was_zeroed(const at::Tensor& gradient, const at::Tensor& stand_in,
                                  int64_t version) {
  return !gradient.defined() || (!gradient.is_same(stand_in) && gradient._version() != version &&
                                 !gradient.any().item<bool>());
}

// A model's zero_grad() is meant for the shards. It makes gradients undefined or, before torch 2,
// zero; stand-ins say that themselves.
void ShardedGradients::notice_zeroed() {
  for (size_t i = 0; i < members().size(); ++i) {
    const at::Tensor& gradient = members()[i].tensor.grad();
    if (!versions_[i] || !was_zeroed(gradient, stand_ins_[i], *versions_[i])) continue;
    zero_gradient(i);
    if (!gradient.defined()) unreduced_members()[i] = false;
    versions_[i].reset();
  }
  // So is an optimizer's, for what is not in the shards yet.
  for (size_t t = 0; t < unreduced_.size(); ++t) {
    const OptimizedTensor& each = shard_.optimized()[t];
    const auto version = std::exchange(unreduced_[t].version, std::nullopt);
    if (!version || !was_zeroed(each.tensor.grad(), unreduced_[t].stand_in, *version)) continue;
    for (size_t i = each.first; i < each.end; ++i) unreduced_members()[i] = false;
  }
}

void ShardedGradients::begin_round(bool is_last) {
  notice_zeroed();
  // What the optimizer sees is the line itself: it continues from there, unless what the line has
  // is in the sum of earlier micro-batches already.
  const bool is_line = gradient_.defined() && gradient_.is_same(line_);
  if (is_line && accumulates() && sum_.is_empty()) filled_.assign(members().size(), true);
  GradientAccumulator::begin_round(is_last);
}

void ShardedGradients::before_accumulation(size_t member) const {
  members()[member].tensor.mutable_grad().reset();
}

void ShardedGradients::collect(size_t member, const at::Tensor& target) {
  at::Tensor& gradient = members()[member].tensor.mutable_grad();
  if (filled_[member]) {
    target.add_(dense(gradient));
  } else {
    target.copy_(dense(gradient));
  }
  gradient = stand_ins_[member];
  versions_[member] = 0;
}

void ShardedGradients::fill_gap(size_t /*member*/, const at::Tensor& target) { target.zero_(); }

void ShardedGradients::zero_gradient(size_t index) {
  const at::NoGradGuard no_grad;
  shard_.updating().wait();  // which reads what is there
  const Member& member = members()[index];
  for (size_t t = 0; t < unreduced_.size(); ++t) {
    const OptimizedTensor& each = shard_.optimized()[t];
    const at::Tensor& gradient = each.tensor.grad();
    if (index < each.first || index >= each.end || !gradient.defined()) continue;
    if (member.shard_numel() == 0 || gradient.is_same(unreduced_[t].stand_in)) continue;
    gradient.view({-1})
        .narrow(0, member.shard_offset - each.range.begin, member.shard_numel())
        .zero_();
  }
  if (line_.defined() && filled_[index]) line_view(index).zero_();
}

bool ShardedGradients::has_unreduced(size_t member) {
  if (plan_.reproducible) return true;  // perhaps, in the sums
  return unreduced_members()[member];
}

void ShardedGradients::on_zero(const Tag& tag, const at::Tensor& view) {
  if (tag.kind == Tag::Kind::gradient) {
    for (size_t i = 0; i < members().size(); ++i) {
      if (members()[i].name == tag.name_of(view)) zero_gradient(i);
    }
    return;
  }
  for (size_t t = 0; t < unreduced_.size(); ++t) {
    if (unreduced_[t].stand_in.storage_offset() != view.storage_offset()) continue;
    const OptimizedTensor& each = shard_.optimized()[t];
    for (size_t i = each.first; i < each.end; ++i) unreduced_members()[i] = false;
  }
}

void ShardedGradients::keep_for_later(const MakeRoom& make_room,
                                      std::optional<int64_t> micro_batch) {
  for (size_t t = 0; t < unreduced_.size(); ++t) {
    at::Tensor& gradient = shard_.optimized()[t].tensor.mutable_grad();
    if (!gradient.defined()) gradient = unreduced_[t].stand_in;
    if (!plan_.reproducible) unreduced_[t].version = gradient._version();
  }
  if (plan_.reproducible) {
    add_to_sum(make_room, micro_batch);
  } else {
    spill();
  }
}

void ShardedGradients::before_launch() {
  for (size_t t = 0; t < unreduced_.size(); ++t) {
    at::Tensor& gradient = shard_.optimized()[t].tensor.mutable_grad();
    if (gradient.is_same(unreduced_[t].stand_in)) gradient.reset();
  }
}

bool ShardedGradients::accumulates() const {
  const auto& optimized = shard_.optimized();
  return std::any_of(optimized.begin(), optimized.end(),
                     [](const OptimizedTensor& each) { return each.tensor.grad().defined(); });
}

at::Tensor ShardedGradients::gradient_memory() {
  return at::empty({shard_.values().numel()},
                   shard_.values().options().dtype(plan_.gradient_dtype));
}

at::Tensor ShardedGradients::scratch(int64_t count) {
  const auto memory = environment_.gather_memory.take(
      static_cast<size_t>(count) * line_.element_size(), line_.device());
  return at::from_blob(
      memory.get(), {count}, [memory](void*) {}, line_.options());
}

void ShardedGradients::make_gradient() {
  if (!gradient_.defined() && !shard_.optimized().empty()) gradient_ = gradient_memory();
}

at::Tensor ShardedGradients::scatter_target() {
  if (!hands_over()) {
    make_gradient();
    if (gradient_.defined() && !accumulates() && gradient_.scalar_type() == plan_.reduce_dtype &&
        gradient_.device() == line_.device()) {
      return gradient_;
    }
  }
  const int64_t count = parameter_.block().size();
  // Memory of a device cannot be empty.
  return count == 0 ? at::empty({0}, line_.options()) : scratch(count);
}

at::Tensor ShardedGradients::place_of(const OptimizedTensor& target) const {
  return gradient_.narrow(0, target.range.begin, target.range.size()).view(target.tensor.sizes());
}

void ShardedGradients::deliver(std::span<const int64_t> num_ranks) {
  if (!shard_.optimized().empty() && !hands_over()) make_gradient();
  for (const OptimizedTensor& each : shard_.optimized()) {
    const auto used = num_ranks.subspan(each.first, each.end - each.first);
    if (std::all_of(used.begin(), used.end(), [](int64_t count) { return count == 0; })) continue;
    deliver_one(each, reduced_.narrow(0, each.range.begin, each.range.size()));
  }
  // The model's own parameters get the whole gradient.
  if (!plan_.whole_gradients || plan_.reduce_dtype != plan_.compute_dtype) return;
  for (size_t i = 0; i < members().size(); ++i) {
    if (num_ranks[i] > 0) members()[i].tensor.mutable_grad().reset();
  }
  show_whole_gradients(num_ranks, plan_.reduce_dtype);
}

void ShardedGradients::deliver_one(const OptimizedTensor& target, const at::Tensor& arrived) {
  at::Tensor& gradient = target.tensor.mutable_grad();
  if (gradient_.data_ptr() == reduced_.data_ptr()) {
    gradient = arrived.to(plan_.gradient_dtype).view(target.tensor.sizes()).detach();
  } else if (gradient.defined()) {
    gradient.add_(arrived.view(gradient.sizes()));
  } else {
    const at::Tensor place = place_of(target);
    place.copy_(arrived.view(place.sizes()));
    gradient = place.detach();
  }
}

size_t ShardedGradients::bytes() const { return gradient_.defined() ? gradient_.nbytes() : 0; }

}  // namespace lockstep::parallel::detail
