// SPDX-License-Identifier: Apache-2.0
// What an offloaded flat does besides: its parameters come from the host, its gradients go there,
// and its shard may be updated while others compute.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "lockstep/parallel/shard/flat.h"

namespace lockstep::parallel::detail {

using layout::Tier;

void Flat::wait_updated() const {
  if (plan_.offload && plan_.offload->params == Tier::host) {
    updating_.wait();  // whoever reads host memory is a thread, not a stream
  } else {
    memory::compute_after(updating_, plan_.device);
  }
  updating_ = {};
}

bool Flat::comes_from_host() const {
  return plan_.offload && plan_.offload->params == Tier::host && plan_.shard.size() == 1 &&
         plan_.compute_dtype == plan_.dtype;
}

bool Flat::has_room() const {
  // Where a gather takes part of all ranks, none may decide by itself.
  if (!plan_.offload || (gather_communicates() && !is_one_sided())) return true;
  const OffloadTiers& tiers = *plan_.offload->tiers;
  const size_t bytes = static_cast<size_t>(layout_.size) * c10::elementSize(plan_.compute_dtype);
  return tiers.param_budget.fits(tiers.device_memory.rounded(bytes)) &&
         tiers.device_memory.fits(bytes);
}

void Flat::fetch() {
  OffloadTiers& tiers = *plan_.offload->tiers;
  line_ = buffer(plan_.compute_dtype, plan_.device);
  // The line's memory was another's, and may still be read by what is queued.
  tiers.fetch->wait(memory::computed(plan_.device));
  tiers.fetch->wait(updating_);
  tiers.to_device(*tiers.fetch, line_.data_ptr(), shard_.data_ptr(), line_.nbytes(), plan_.name);
  fetched_ = tiers.fetch->record();
  if (!tiers.options.overlap) fetched_.wait();
  state_ = ParameterState::gathering;
}

bool Flat::consumes_gradients() const {
  return plan_.offload && plan_.offload->tiers->updates_in_backward() && *context_.is_last_round;
}

void Flat::send_to_host(const at::Tensor& gradient, const at::Tensor& arrived, bool adds) {
  OffloadTiers& tiers = *plan_.offload->tiers;
  const at::Tensor source = arrived.to(gradient.scalar_type());
  tiers.send->wait(memory::computed(plan_.device));
  tiers.send->wait(updating_);  // which reads what was there
  if (!adds) {
    tiers.to_host(*tiers.send, gradient.data_ptr(), source.data_ptr(), source.nbytes(), plan_.name);
    gradients_moved_ = tiers.send->record();
  } else {
    const at::Tensor stage = tiers.stage(source.numel(), source.scalar_type());
    tiers.to_host(*tiers.send, stage.data_ptr(), source.data_ptr(), source.nbytes(), plan_.name);
    tiers.driver->wait(tiers.send->record());
    tiers.driver->run(
        [sum = gradient.view({-1}), stage] {
          const at::NoGradGuard no_grad;
          sum.add_(stage);
        },
        "add gradients");
    gradients_moved_ = tiers.driver->record();
    tiers.return_stage(stage, gradients_moved_);
  }
  tiers.retire(std::make_shared<at::Tensor>(source), gradients_moved_);
}

void Flat::put_aside() {
  if (!plan_.offload || plan_.offload->grads != Tier::host || !gradients_.defined() ||
      context_.options->reproducible) {
    return;
  }
  const at::NoGradGuard no_grad;
  OffloadTiers& tiers = *plan_.offload->tiers;
  fill_gaps();
  if (!aside_.defined()) {
    aside_ = tiers.on_host(
        layout_.size, plan_.reduce_dtype,
        "unreduced gradients of " + plan_.name + " (NoSyncGradients::sharded needs less)");
  }
  tiers.send->wait(memory::computed(plan_.device));
  tiers.to_host(*tiers.send, aside_.data_ptr(), gradients_.data_ptr(), gradients_.nbytes(),
                plan_.name);
  gradients_moved_ = tiers.send->record();
  aside_filled_ = std::exchange(filled_, std::vector<bool>(members_.size(), false));
  close_gradients(gradients_moved_);
}

void Flat::bring_back() {
  if (aside_filled_.empty()) return;
  OffloadTiers& tiers = *plan_.offload->tiers;
  tiers.fetch->wait(memory::computed(plan_.device));
  tiers.fetch->wait(gradients_moved_);
  tiers.to_device(*tiers.fetch, gradients_.data_ptr(), aside_.data_ptr(), gradients_.nbytes(),
                  plan_.name);
  memory::compute_after(tiers.fetch->record(), plan_.device);
  filled_ = std::exchange(aside_filled_, {});
}

void Flat::wait_gradients() { std::exchange(gradients_moved_, {}).wait(); }

bool Flat::is_on_host(const at::Tensor& gradient) const {
  if (plan_.offload->grads != Tier::host || !shard_gradient_.defined()) return false;
  const auto* const begin = static_cast<const std::byte*>(shard_gradient_.data_ptr());
  const auto* const data = static_cast<const std::byte*>(gradient.data_ptr());
  return data >= begin && data < begin + shard_gradient_.nbytes();
}

std::vector<Flat::OffloadedTensor> Flat::offloaded() const {
  std::vector<OffloadedTensor> all;
  for (size_t i = 0; i < optimized_.size(); ++i) {
    const Optimized& each = optimized_[i];
    all.push_back({each.name, each.tensor, shard_.narrow(0, each.range.begin, each.range.size()),
                   &plan_.offload->states[i]});
  }
  return all;
}

void Flat::let_go_of_gradients(const memory::Event& read) {
  for (const Optimized& each : optimized_) each.tensor.mutable_grad().reset();
  if (!reduced_.defined()) return;
  plan_.offload->tiers->retire(std::make_shared<at::Tensor>(reduced_), read);
  if (!scatters()) close_gradients(read);
}

}  // namespace lockstep::parallel::detail
