// SPDX-License-Identifier: Apache-2.0
#include "lockstep/nn/loss.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/nn/autograd/one_derivative.h"
#include "lockstep/nn/kernels/fused_cuda.h"
#include "lockstep/nn/vocab_loss.h"

namespace lockstep::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The gradient is computed with the loss, while the logits are at hand.
struct FusedCrossEntropy : torch::autograd::Function<FusedCrossEntropy> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& logits,
                            const at::Tensor& targets, double scale, bool overwrite) {
    const at::Tensor gradient = overwrite ? logits.detach() : at::empty_like(logits);
    const at::Tensor losses = cuda::cross_entropy(logits, targets, kIgnoredTarget, scale, gradient);
    context->save_for_backward({gradient});  // let go by backward
    return losses.sum();
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    require_one_derivative("cross_entropy");
    const at::Tensor gradient = context->get_saved_variables()[0];
    cuda::scale_unless_one(gradient, gradients[0]);
    return {gradient, at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

}  // namespace

at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& targets,
                         const CrossEntropyOptions& options) {
  if (logits.dim() != 2 || targets.dim() != 1 || logits.size(0) != targets.size(0)) {
    throw ConfigError(format("[cross_entropy] logits are ({}), targets ({}), must be (N, V), (N)",
                             join(logits.sizes()), join(targets.sizes())));
  }
  if (logits.device() != targets.device()) {
    throw ConfigError(
        format("[cross_entropy] logits are on {}, targets on {}, must be on one device",
               logits.device().str(), targets.device().str()));
  }
  if (options.group.size() > 1) return vocab_cross_entropy(logits, targets, options);
  if (cuda::has_fused_kernels(logits) && logits.is_contiguous() &&
      (logits.requires_grad() || options.overwrite_logits)) {
    return FusedCrossEntropy::apply(logits, targets.contiguous(), options.scale,
                                    options.overwrite_logits);
  }
  return at::cross_entropy_loss(logits.to(at::kFloat), targets, {}, at::Reduction::Sum,
                                kIgnoredTarget) *
         options.scale;
}

}  // namespace lockstep::nn
