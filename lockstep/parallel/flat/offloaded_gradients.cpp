// SPDX-License-Identifier: Apache-2.0
#include "lockstep/parallel/flat/offloaded_gradients.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>

namespace lockstep::parallel::detail {
namespace {

// Whole gradients are there to be looked at after backward, so they keep their memory; unless they
// leave it in the meantime.
bool keeps_line(const FlatPlan& plan) {
  return !plan.scatters() && plan.offload->grads == layout::Tier::device &&
         !plan.offload->tiers->updates_in_backward();
}

}  // namespace

OffloadedGradients::OffloadedGradients(FlatParameter& parameter, FlatShard& shard,
                                       FlatEnvironment& environment)
    : ShardedGradients(parameter, shard, environment, detail::keeps_line(parameter.plan())) {}

void OffloadedGradients::begin_round(bool is_last) {
  ShardedGradients::begin_round(is_last);
  const bool has_some =
      accumulates() || std::ranges::count(unreduced_members(), true) > 0 || !sum_.is_empty();
  if (!leaves_ || has_some) return;
  leaves_ = false;
  parameter_.offload().grads = layout::Tier::host;
  // An update of a flat that the forward did not use may still read them.
  if (gradient_.defined())
    tiers().retire(std::make_shared<at::Tensor>(std::exchange(gradient_, {})), shard_.updating());
  stop_keeping_line();
}

std::vector<bool>& OffloadedGradients::unreduced_members() {
  return in_spilled_.empty() ? filled_ : in_spilled_;
}

void OffloadedGradients::zero_gradient(size_t member) {
  ShardedGradients::zero_gradient(member);
  if (!in_spilled_.empty()) in_spilled_[member] = false;
}

bool OffloadedGradients::hands_over() const {
  return tiers().updates_in_backward() && is_last_round_;
}

at::Tensor OffloadedGradients::gradient_memory() {
  if (keeps_line() && plan_.gradient_dtype == plan_.reduce_dtype)
    return line_;  // a group of one: all of it is this rank's
  const std::string what = "gradients of " + plan_.name;
  const int64_t count = shard_.values().numel();
  return rests_on_host() ? tiers().on_host(count, plan_.gradient_dtype, what)
                         : tiers().on_device(count, plan_.gradient_dtype, what);
}

at::Tensor OffloadedGradients::scratch(int64_t count) {
  return tiers().on_device(count, line_.scalar_type(), "gradients of " + plan_.name,
                           memory::Stay::short_time);
}

void OffloadedGradients::deliver(std::span<const int64_t> num_ranks) {
  consumed_ = hands_over() && !accumulates();
  if (!consumed_) make_gradient();
  ShardedGradients::deliver(num_ranks);
}

void OffloadedGradients::deliver_one(const OptimizedTensor& target, const at::Tensor& arrived) {
  at::Tensor& gradient = target.tensor.mutable_grad();
  if (consumed_) {
    gradient = arrived.to(plan_.gradient_dtype).view(target.tensor.sizes()).detach();
  } else if (rests_on_host() && gradient_.data_ptr() != reduced_.data_ptr()) {
    const bool adds = gradient.defined();
    if (!adds) gradient = place_of(target);
    send_to_host(gradient, arrived, adds);
  } else {
    ShardedGradients::deliver_one(target, arrived);
  }
}

void OffloadedGradients::send_to_host(const at::Tensor& gradient, const at::Tensor& arrived,
                                      bool adds) {
  const at::Tensor source = arrived.to(gradient.scalar_type());
  memory::Queue& send = *tiers().send;
  send.wait(memory::computed(plan_.device));
  send.wait(shard_.updating());  // which reads what was there
  if (!adds) {
    tiers().to_host(send, gradient.data_ptr(), source.data_ptr(), source.nbytes(), plan_.name);
    moved_ = send.record();
  } else {
    const at::Tensor stage = tiers().stage(source.numel(), source.scalar_type());
    tiers().to_host(send, stage.data_ptr(), source.data_ptr(), source.nbytes(), plan_.name);
    tiers().driver->wait(send.record());
    tiers().driver->run(
        [sum = gradient.view({-1}), stage] {
          const at::NoGradGuard no_grad;
          sum.add_(stage);
        },
        "add gradients");
    moved_ = tiers().driver->record();
    tiers().return_stage(stage, moved_);
  }
  tiers().retire(std::make_shared<at::Tensor>(source), moved_);
}

void OffloadedGradients::give_back() {
  if (hands_over()) {
    tiers().take_gradients(parameter_.index());  // lets go of them
  } else if (!plan_.scatters()) {
    close_line(moved_);
  }
}

void OffloadedGradients::spill() {
  if (!rests_on_host() || !line_.defined() || plan_.reproducible) return;
  const at::NoGradGuard no_grad;
  fill_gaps();
  if (!spilled_.defined()) {
    spilled_ = tiers().on_host(
        parameter_.layout().size, plan_.reduce_dtype,
        "unreduced gradients of " + plan_.name + " (NoSyncGradients::sharded needs less)");
  }
  memory::Queue& send = *tiers().send;
  send.wait(memory::computed(plan_.device));
  tiers().to_host(send, spilled_.data_ptr(), line_.data_ptr(), line_.nbytes(), plan_.name);
  moved_ = send.record();
  in_spilled_ = std::exchange(filled_, std::vector<bool>(members().size(), false));
  close_line(moved_);
}

void OffloadedGradients::restore() {
  if (in_spilled_.empty()) return;
  memory::Queue& fetch = *tiers().fetch;
  fetch.wait(memory::computed(plan_.device));
  fetch.wait(moved_);
  tiers().to_device(fetch, line_.data_ptr(), spilled_.data_ptr(), line_.nbytes(), plan_.name);
  memory::compute_after(fetch.record(), plan_.device);
  filled_ = std::exchange(in_spilled_, {});
}

void OffloadedGradients::abandon() {
  in_spilled_.clear();
  ShardedGradients::abandon();
}

bool OffloadedGradients::owns(const at::Tensor& gradient) const {
  if (!gradient_.defined()) return false;
  const auto* const begin = static_cast<const std::byte*>(gradient_.data_ptr());
  const auto* const data = static_cast<const std::byte*>(gradient.data_ptr());
  return data >= begin && data < begin + gradient_.nbytes();
}

void OffloadedGradients::let_go(const memory::Event& read) {
  for (const OptimizedTensor& each : shard_.optimized()) each.tensor.mutable_grad().reset();
  if (!reduced_.defined()) return;
  tiers().retire(std::make_shared<at::Tensor>(reduced_), read);
  if (!plan_.scatters()) close_line(read);
}

}  // namespace lockstep::parallel::detail
