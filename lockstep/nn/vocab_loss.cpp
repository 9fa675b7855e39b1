// SPDX-License-Identifier: Apache-2.0
#include "lockstep/nn/vocab_loss.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "lockstep/comm/collectives.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/layout/shard_math.h"
#include "lockstep/nn/autograd/one_derivative.h"

namespace lockstep::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The gradient is computed with the loss, where the exponentials are.
struct VocabCrossEntropy : torch::autograd::Function<VocabCrossEntropy> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& logits,
                            const at::Tensor& targets, const CrossEntropyOptions& options,
                            int64_t first, bool wants_gradient) {
    const bool in_place = options.overwrite_logits && logits.scalar_type() == at::kFloat;
    const at::Tensor values =
        logits.detach().to(at::kFloat, /*non_blocking=*/false, /*copy=*/!in_place);
    const at::Tensor largest = values.amax(1);
    comm::all_reduce(largest, options.group, {.op = comm::ReduceOp::max, .tag = "largest logits"})
        .wait();
    values.sub_(largest.unsqueeze(1));

    const at::Tensor place = (targets - first).unsqueeze(1);  // (N, 1)
    const at::Tensor is_mine = place.ge(0).logical_and_(place.lt(values.size(1)));
    const at::Tensor column = place.clamp(0, values.size(1) - 1);
    const at::Tensor sums = at::empty({2, values.size(0)}, values.options());
    sums[0].copy_(values.gather(1, column).masked_fill_(is_mine.logical_not(), 0).squeeze(1));
    values.exp_();
    at::Tensor exponentials = sums[1];
    at::sum_out(exponentials, values, 1);
    comm::all_reduce(sums, options.group, {.tag = "sums of exponentials"}).wait();

    const at::Tensor counts = targets.ne(kIgnoredTarget).to(at::kFloat).mul_(options.scale);
    if (wants_gradient) {
      values.mul_((counts / sums[1]).unsqueeze(1));
      values.scatter_add_(1, column, is_mine.to(at::kFloat).mul_(counts.neg().unsqueeze(1)));
      context->save_for_backward({values.to(logits.scalar_type())});  // let go by backward
    }
    return sums[1].log().sub_(sums[0]).mul_(counts).sum();
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    require_one_derivative("cross_entropy");
    variable_list results(5);
    results[0] = context->get_saved_variables()[0].mul_(gradients[0]);
    return results;
  }
};

}  // namespace

at::Tensor vocab_cross_entropy(const at::Tensor& logits, const at::Tensor& targets,
                               const CrossEntropyOptions& options) {
  const layout::Range columns =
      layout::balanced_range(options.vocab, options.group.size(), options.group.rank());
  if (options.vocab < 1 || logits.size(1) != columns.size()) {
    throw ConfigError(format(
        "[cross_entropy] logits have {} columns on rank {} of {}, must have {} of a "
        "vocabulary of {} (option vocab)",
        logits.size(1), options.group.rank(), options.group.size(), columns.size(), options.vocab));
  }
  // On a device it would have to be waited for.
  if (targets.is_cpu() && targets.ne(kIgnoredTarget)
                              .logical_and_(targets.lt(0).logical_or_(targets.ge(options.vocab)))
                              .any()
                              .item<bool>()) {
    throw ConfigError(
        format("[cross_entropy] targets go from {} to {}, must be in a vocabulary of "
               "{}, or {}",
               targets.min().item<int64_t>(), targets.max().item<int64_t>(), options.vocab,
               kIgnoredTarget));
  }
  return VocabCrossEntropy::apply(logits, targets, options, columns.begin,
                                  logits.requires_grad() && c10::GradMode::is_enabled());
}

}  // namespace lockstep::nn
