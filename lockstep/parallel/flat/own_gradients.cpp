// SPDX-License-Identifier: Apache-2.0
#include "lockstep/parallel/flat/own_gradients.h"

#include <ATen/ATen.h>

#include "lockstep/core/error.h"

namespace lockstep::parallel::detail {

void OwnGradients::begin_round(bool is_last) {
  // What the user did to a gradient that waits in the line counts, not what the line has.
  for (size_t i = 0; i < members().size(); ++i) {
    const at::Tensor& gradient = members()[i].tensor.grad();
    filled_[i] =
        filled_[i] && line_.defined() && gradient.defined() && same_memory(gradient, line_view(i));
  }
  GradientAccumulator::begin_round(is_last);
}

void OwnGradients::collect(size_t member, const at::Tensor& target) {
  at::Tensor& gradient = members()[member].tensor.mutable_grad();
  if (same_memory(gradient, target)) return;
  target.copy_(dense(gradient));
  gradient = target.detach();
}

void OwnGradients::fill_gap(size_t member, const at::Tensor& target) {
  const at::Tensor& gradient = members()[member].tensor.grad();
  if (!gradient.defined()) {
    target.zero_();
  } else if (!same_memory(gradient, target)) {
    target.copy_(dense(gradient));
  }
}

at::Tensor OwnGradients::scatter_target() {
  check(false, "the model's own parameters are not shared out");
  return {};
}

void OwnGradients::deliver(std::span<const int64_t> num_ranks) {
  show_whole_gradients(num_ranks, plan_.gradient_dtype);
}

bool OwnGradients::has_unreduced(size_t member) {
  return plan_.reproducible || members()[member].tensor.grad().defined();
}

void OwnGradients::keep_for_later(const MakeRoom& make_room, std::optional<int64_t> micro_batch) {
  if (plan_.reproducible) add_to_sum(make_room, micro_batch);
}

}  // namespace lockstep::parallel::detail
