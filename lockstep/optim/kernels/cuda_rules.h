// SPDX-License-Identifier: Apache-2.0
// What an update does with one element on CUDA: the arithmetic of kernels.cpp, operation by
// operation; built without fused multiply-add, so that the bits are the CPU's. Private: not
// installed.
#pragma once

#include "lockstep/optim/kernels/kernels.h"

namespace lockstep::optim::cuda {
namespace {

// V is float, or double for parameters of float64. An update returns the new weight and changes the
// moments that it has.
template <class V>
struct AdamWRule {
  static constexpr int kMoments = 2;
  V decay, beta1, rest1, beta2, rest2, eps, step_size, root_scale, grad_factor;

  explicit AdamWRule(const AdamWFactors& wide)
      : decay(static_cast<V>(wide.decay)),
        beta1(static_cast<V>(wide.beta1)),
        rest1(static_cast<V>(1 - wide.beta1)),
        beta2(static_cast<V>(wide.beta2)),
        rest2(static_cast<V>(1 - wide.beta2)),
        eps(static_cast<V>(wide.eps)),
        step_size(static_cast<V>(wide.step_size)),
        root_scale(static_cast<V>(wide.root_scale)),
        grad_factor(static_cast<V>(wide.grad_factor)) {}

  __device__ V operator()(V weight, V grad, V& mean, V& square) const {
    mean = mean * beta1 + rest1 * grad;
    square = square * beta2 + rest2 * grad * grad;
    return weight * decay - step_size * mean / (sqrt(square) * root_scale + eps);
  }
};

template <class V, detail::SgdKind kKind>
struct SgdRule {
  static constexpr int kMoments = kKind == detail::SgdKind::plain ? 0 : 1;
  V lr, weight_decay, keep, add, momentum, grad_factor;

  explicit SgdRule(const detail::SgdFactors& wide)
      : lr(static_cast<V>(wide.lr)),
        weight_decay(static_cast<V>(wide.weight_decay)),
        keep(static_cast<V>(wide.keep)),
        add(static_cast<V>(wide.add)),
        momentum(static_cast<V>(wide.momentum)),
        grad_factor(static_cast<V>(wide.grad_factor)) {}

  __device__ V operator()(V weight, V grad, V& buffer, V&) const {
    V direction = grad + weight_decay * weight;
    if constexpr (kMoments == 1) {
      buffer = keep * buffer + add * direction;
      direction = kKind == detail::SgdKind::nesterov ? direction + momentum * buffer : buffer;
    }
    return weight - lr * direction;
  }
};

// launch(rule) for SGD of this kind.
template <class V, class Launch>
void for_sgd(detail::SgdKind kind, const detail::SgdFactors& factors, const Launch& launch) {
  using detail::SgdKind;
  if (kind == SgdKind::plain) return launch(SgdRule<V, SgdKind::plain>(factors));
  if (kind == SgdKind::momentum) return launch(SgdRule<V, SgdKind::momentum>(factors));
  launch(SgdRule<V, SgdKind::nesterov>(factors));
}

}  // namespace
}  // namespace lockstep::optim::cuda
