// SPDX-License-Identifier: Apache-2.0
// The way of gradients: from the model's parameters into a line, over the group, to the shards.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "lockstep/comm/collectives.h"
#include "lockstep/core/trace.h"
#include "lockstep/parallel/shard/flat.h"

namespace lockstep::parallel::detail {
namespace {

bool same_memory(const at::Tensor& a, const at::Tensor& b) {
  return a.layout() == b.layout() && a.data_ptr() == b.data_ptr() && a.strides() == b.strides() &&
         a.scalar_type() == b.scalar_type();
}

at::Tensor dense(const at::Tensor& gradient) {
  return gradient.is_sparse() ? gradient.to_dense() : gradient;
}

}  // namespace

const comm::Group& Flat::gradient_group() const {
  return plan_.shard.size() > 1 ? plan_.reduce : plan_.replicas;
}

at::Tensor Flat::gradient_view(const Member& member) const {
  return gradients_.narrow(0, member.offset, member.numel()).view(member.shape);
}

void Flat::open_gradients(const std::function<bool()>& make_room) {
  if (gradients_.defined()) return;
  const auto bytes = layout_.size * static_cast<int64_t>(c10::elementSize(plan_.reduce_dtype));
  if (!gradient_block_.defined()) {
    const auto size = static_cast<size_t>(bytes);
    gradient_block_ = keeps_gradients() ? context_.gradient_memory->keep(size)
                                        : context_.gradient_memory->take(size, make_room);
  }
  gradients_ = gradient_block_.narrow(0, 0, bytes).view(plan_.reduce_dtype);
  // What is between parameters goes through the optimizer too.
  for (const Member& member : members_) {
    const int64_t end = member.offset + member.numel();
    const int64_t next = &member == &members_.back() ? layout_.size : (&member + 1)->offset;
    if (next > end) gradients_.narrow(0, end, next - end).zero_();
  }
  bring_back();
}

// Whole gradients are there to be looked at after backward, so they keep their memory; unless they
// leave it in the meantime.
bool Flat::keeps_gradients() const {
  if (scatters()) return false;
  return !plan_.offload || (plan_.offload->grads == layout::Tier::device &&
                            !plan_.offload->tiers->updates_in_backward());
}

void Flat::close_gradients(const memory::Event& unused) {
  if (keeps_gradients()) return;
  if (gradient_block_.defined()) context_.gradient_memory->busy_until(gradient_block_, unused);
  gradients_.reset();
  gradient_block_.reset();
}

void Flat::zero_gradient(size_t index) {
  const at::NoGradGuard no_grad;
  updating_.wait();  // which reads what is there
  const Member& member = members_[index];
  for (const Optimized& each : optimized_) {
    const at::Tensor& gradient = each.tensor.grad();
    if (index < each.first || index >= each.end || !gradient.defined()) continue;
    if (member.shard_numel() == 0 || gradient.is_same(each.unreduced)) continue;
    gradient.view({-1})
        .narrow(0, member.shard_offset - each.range.begin, member.shard_numel())
        .zero_();
  }
  if (gradients_.defined() && filled_[index]) gradient_view(member).zero_();
  if (!aside_filled_.empty()) aside_filled_[index] = false;
}

// A model's zero_grad() is meant for the shards. It makes gradients undefined or, before torch 2,
// zero; stand-ins say that themselves.
void Flat::notice_zeroed() {
  if (plain_) return;
  for (size_t i = 0; i < members_.size(); ++i) {
    if (!versions_[i]) continue;
    const at::Tensor& gradient = members_[i].tensor.grad();
    const bool zeroed = !gradient.defined() ||
                        (!gradient.is_same(stand_ins_[i]) && gradient._version() != *versions_[i] &&
                         !gradient.any().item<bool>());
    if (!zeroed) continue;
    zero_gradient(i);
    if (!gradient.defined()) drop_unreduced(i);
    versions_[i].reset();
  }
  // So is an optimizer's, for what is not in the shards yet.
  for (Optimized& each : optimized_) {
    const auto version = std::exchange(each.version, std::nullopt);
    if (!version) continue;
    const at::Tensor& gradient = each.tensor.grad();
    const bool zeroed =
        !gradient.defined() || (!gradient.is_same(each.unreduced) &&
                                gradient._version() != *version && !gradient.any().item<bool>());
    for (size_t i = each.first; i < each.end && zeroed; ++i) drop_unreduced(i);
  }
}

void Flat::drop_unreduced(size_t member) {
  (aside_filled_.empty() ? filled_ : aside_filled_)[member] = false;
}

bool Flat::has_unreduced(size_t member) const {
  if (context_.options->reproducible) return true;  // perhaps, in the sums
  if (plain_) return members_[member].tensor.grad().defined();
  return (aside_filled_.empty() ? filled_ : aside_filled_)[member];
}

void Flat::zero_unreduced(const at::Tensor& view) {
  for (const Optimized& each : optimized_) {
    if (plain_ || each.unreduced.storage_offset() != view.storage_offset()) continue;
    for (size_t i = each.first; i < each.end; ++i) drop_unreduced(i);
  }
}

void Flat::begin_round() {
  notice_zeroed();
  // What the user did to a gradient that waits in the line counts, not what the line has.
  for (size_t i = 0; plain_ && i < members_.size(); ++i) {
    const at::Tensor& gradient = members_[i].tensor.grad();
    filled_[i] = filled_[i] && gradients_.defined() && gradient.defined() &&
                 same_memory(gradient, gradient_view(members_[i]));
  }
  // What the optimizer sees is the line itself: it goes on from there, unless what the line has is
  // in the sum of earlier micro-batches already.
  const bool is_line = shard_gradient_.defined() && shard_gradient_.is_same(gradients_);
  if (is_line && accumulates() && sum_.is_empty()) filled_.assign(members_.size(), true);
  arrived_.assign(members_.size(), false);
  num_arrived_ = 0;
}

void Flat::before_accumulation(const Member& member) const {
  if (!plain_) member.tensor.mutable_grad().reset();
}

void Flat::arrive(size_t index, const std::function<bool()>& make_room) {
  const at::NoGradGuard no_grad;
  const Member& member = members_[index];
  at::Tensor& gradient = member.tensor.mutable_grad();
  open_gradients(make_room);
  const at::Tensor target = gradient_view(member);
  if (plain_) {
    if (!same_memory(gradient, target)) {
      target.copy_(dense(gradient));
      gradient = target.detach();
    }
  } else {
    if (filled_[index]) {
      target.add_(dense(gradient));
    } else {
      target.copy_(dense(gradient));
    }
    gradient = stand_ins_[index];
    versions_[index] = 0;
  }
  filled_[index] = true;
  if (!arrived_[index]) ++num_arrived_;
  arrived_[index] = true;
}

void Flat::fill_gaps() {
  for (size_t i = 0; i < members_.size(); ++i) {
    if (filled_[i]) continue;
    const at::Tensor place = gradient_view(members_[i]);
    const at::Tensor& gradient = members_[i].tensor.grad();
    if (!plain_ || !gradient.defined()) {
      place.zero_();
    } else if (!same_memory(gradient, place)) {
      place.copy_(dense(gradient));
    }
  }
}

bool Flat::accumulates() const {
  return std::any_of(optimized_.begin(), optimized_.end(),
                     [](const Optimized& each) { return each.tensor.grad().defined(); });
}

void Flat::make_shard_gradient() {
  if (shard_gradient_.defined() || optimized_.empty()) return;
  if (!plan_.offload) {
    shard_gradient_ = at::empty({shard_.numel()}, shard_.options().dtype(gradient_dtype()));
    return;
  }
  const OffloadTiers& tiers = *plan_.offload->tiers;
  if (keeps_gradients() && gradient_dtype() == plan_.reduce_dtype) {
    shard_gradient_ = gradients_;  // a group of one: all of it is this rank's
    return;
  }
  const std::string what = "gradients of " + plan_.name;
  shard_gradient_ = plan_.offload->grads == layout::Tier::host
                        ? tiers.on_host(shard_.numel(), gradient_dtype(), what)
                        : tiers.on_device(shard_.numel(), gradient_dtype(), what);
}

void Flat::show_unreduced() {
  for (Optimized& each : optimized_) {
    if (!plain_ && !each.tensor.grad().defined()) each.tensor.mutable_grad() = each.unreduced;
  }
}

void Flat::hide_unreduced() {
  for (const Optimized& each : optimized_) {
    if (!plain_ && each.tensor.grad().is_same(each.unreduced)) each.tensor.mutable_grad().reset();
  }
}

void Flat::launch(const std::function<bool()>& make_room, Leaf leaf) {
  const at::NoGradGuard no_grad;
  hide_unreduced();
  open_gradients(make_room);
  fill_gaps();
  const bool ordered = context_.options->reproducible;
  if (ordered && leaf.index) {
    if (leaf.is_new) sum_.push(gradients_, leaf.index);
    sum_.write_sum(gradients_);
  } else if (ordered) {
    sum_.finish(gradients_);
  }
  in_flight_ = true;
  const comm::ReduceOptions average{.op = comm::ReduceOp::avg, .tag = plan_.name};
  if (!scatters()) {
    reducing_ = ordered ? comm::all_reduce_ordered(gradients_, gradient_group(), average)
                        : comm::all_reduce(gradients_, gradient_group(), average);
    return;
  }
  if (!consumes_gradients()) make_shard_gradient();
  const bool in_place = !consumes_gradients() && shard_gradient_.defined() && !accumulates() &&
                        shard_gradient_.scalar_type() == plan_.reduce_dtype &&
                        shard_gradient_.device() == gradients_.device();
  if (in_place) {
    reduced_ = shard_gradient_;
  } else if (block().size() == 0) {  // memory of a device cannot be empty
    reduced_ = at::empty({0}, gradients_.options());
  } else {
    const int64_t count = block().size();
    if (plan_.offload) {
      reduced_ = plan_.offload->tiers->on_device(
          count, gradients_.scalar_type(), "gradients of " + plan_.name, memory::Stay::short_time);
    } else {
      const auto memory = context_.gather_memory->take(
          static_cast<size_t>(count) * gradients_.element_size(), gradients_.device());
      reduced_ = at::from_blob(
          memory.get(), {count}, [memory](void*) {}, gradients_.options());
    }
  }
  const comm::ReduceScatterOptions scatter{
      .op = comm::ReduceOp::avg, .counts = layout_.counts(), .tag = plan_.name};
  reducing_ = ordered ? comm::reduce_scatter_ordered(reduced_, gradients_, plan_.reduce, scatter)
                      : comm::reduce_scatter(reduced_, gradients_, plan_.reduce, scatter);
}

void Flat::wait_reduced() {
  if (!in_flight_) return;
  const at::NoGradGuard no_grad;
  in_flight_ = false;
  std::exchange(reducing_, {}).wait();
  if (scatters() && plan_.replicas.size() > 1) {
    const comm::ReduceOptions average{.op = comm::ReduceOp::avg, .tag = plan_.name};
    (context_.options->reproducible ? comm::all_reduce_ordered(reduced_, plan_.replicas, average)
                                    : comm::all_reduce(reduced_, plan_.replicas, average))
        .wait();
  }
  if (!plain_ && !scatters()) reduced_ = gradients_.narrow(0, block().begin, block().size());
  settled_ = false;
  if (scatters()) close_gradients();
  // Whether anybody used it need not be asked where this rank did.
  if (is_complete()) settle(std::vector<int64_t>(members_.size(), 1));
}

void Flat::settle(std::span<const int64_t> num_ranks) {
  if (settled_) return;
  const at::NoGradGuard no_grad;
  settled_ = true;
  if (!plain_) settle_shards(num_ranks);
  if (plain_ || (plan_.whole_gradients && plan_.reduce_dtype == plan_.compute_dtype))
    settle_parameters(num_ranks);
  filled_.assign(members_.size(), false);
  if (consumes_gradients()) {
    plan_.offload->tiers->take_gradients(index_);  // lets go of them
  } else if (!scatters()) {
    close_gradients(gradients_moved_);
  }
  reduced_.reset();
}

at::ScalarType Flat::gradient_dtype() const {
  return context_.options->mixed_precision.keep_low_precision_grads ? plan_.reduce_dtype
                                                                    : plan_.dtype;
}

void Flat::settle_shards(std::span<const int64_t> num_ranks) {
  if (optimized_.empty()) return;
  const bool consumed = consumes_gradients() && !accumulates();
  if (!consumed) make_shard_gradient();
  for (const Optimized& each : optimized_) {
    const auto used = num_ranks.subspan(each.first, each.end - each.first);
    if (std::all_of(used.begin(), used.end(), [](int64_t count) { return count == 0; })) continue;
    const at::Tensor arrived = reduced_.narrow(0, each.range.begin, each.range.size());
    at::Tensor& gradient = each.tensor.mutable_grad();
    if (consumed || shard_gradient_.data_ptr() == reduced_.data_ptr()) {
      gradient = arrived.to(gradient_dtype()).view(each.tensor.sizes()).detach();
      continue;
    }
    if (plan_.offload && plan_.offload->grads == layout::Tier::host) {
      const bool adds = gradient.defined();
      if (!adds) {
        gradient = shard_gradient_.narrow(0, each.range.begin, each.range.size())
                       .view(each.tensor.sizes());
      }
      send_to_host(gradient, arrived, adds);
      continue;
    }
    if (gradient.defined()) {
      gradient.add_(arrived.view(gradient.sizes()));
      continue;
    }
    const at::Tensor place = shard_gradient_.narrow(0, each.range.begin, each.range.size());
    place.copy_(arrived);
    gradient = place.view(each.tensor.sizes()).detach();
  }
}

// The model's own parameters get the whole gradient.
void Flat::settle_parameters(std::span<const int64_t> num_ranks) {
  for (size_t i = 0; i < members_.size(); ++i) {
    at::Tensor& gradient = members_[i].tensor.mutable_grad();
    if (num_ranks[i] == 0) {
      // Its place has been filled with zeros: not by the user.
      if (versions_[i] && gradient.defined()) versions_[i] = gradient._version();
      continue;
    }
    const at::Tensor place = gradient_view(members_[i]);
    if (plain_ && plan_.reduce_dtype != gradient_dtype()) {
      gradient = place.to(gradient_dtype());
    } else if (!plain_ || !gradient.defined() || !same_memory(gradient, place)) {
      gradient = place.detach();
      versions_[i] = gradient._version();
    }
  }
}

void Flat::keep_for_later(const std::function<bool()>& make_room,
                          std::optional<int64_t> micro_batch) {
  show_unreduced();
  if (!context_.options->reproducible) {
    for (Optimized& each : optimized_) {
      if (!plain_) each.version = each.tensor.grad()._version();
    }
    return put_aside();
  }
  const at::NoGradGuard no_grad;
  open_gradients(make_room);
  fill_gaps();
  sum_.push(gradients_, micro_batch);
  for (const Member& member : members_) member.tensor.mutable_grad().reset();
  versions_.assign(members_.size(), std::nullopt);
  close_gradients();
  filled_.assign(members_.size(), false);
}

void Flat::abandon() {
  sum_ = {};
  aside_filled_.clear();
  if (in_flight_) {
    in_flight_ = false;
    std::exchange(reducing_, {}).wait();
  }
  settled_ = true;
  reduced_.reset();
  close_gradients();
  filled_.assign(members_.size(), false);
}

}  // namespace lockstep::parallel::detail
