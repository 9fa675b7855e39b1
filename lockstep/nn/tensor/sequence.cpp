// SPDX-License-Identifier: Apache-2.0
#include "lockstep/nn/tensor/sequence.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "lockstep/comm/collectives.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/nn/autograd/capsule.h"
#include "lockstep/nn/autograd/one_derivative.h"
#include "lockstep/nn/autograd/product.h"

namespace lockstep::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// (..., T, C) as (..., ranks, T / ranks, C).
at::Tensor as_parts(const at::Tensor& whole, const comm::Group& group) {
  const int64_t length = whole.size(-2);
  sequence_part(length, group);
  std::vector<int64_t> sizes = whole.sizes().vec();
  sizes.insert(sizes.end() - 2, group.size());
  sizes[sizes.size() - 2] = length / group.size();
  return whole.reshape(sizes);
}

struct SumOverRanks : torch::autograd::Function<SumOverRanks> {
  static at::Tensor forward(AutogradContext*, const at::Tensor& partial, const comm::Group& group) {
    // The sum takes the place of the product, which recomputation may keep: so it keeps the sum,
    // and the second call does not add up sums.
    return kept_product([&] {
      const at::Tensor sum = partial.detach();
      comm::all_reduce(sum, group, {.tag = "tensor-parallel sum"}).wait();
      return sum;
    });
  }
  static variable_list backward(AutogradContext*, const variable_list& gradients) {
    return {gradients[0], at::Tensor()};
  }
};

struct SumToParts : torch::autograd::Function<SumToParts> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& partial,
                            const comm::Group& group) {
    save_value(*context, "group", group);
    return SequenceReduction(partial, group).wait();
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    require_one_derivative("a sum of parts");
    if (!gradients[0].defined()) return {at::Tensor(), at::Tensor()};
    const auto group = saved_value<comm::Group>(*context, "group");
    return {SequenceGather(gradients[0], group).wait(), at::Tensor()};
  }
};

}  // namespace

layout::Range sequence_part(int64_t length, const comm::Group& group) {
  if (length % group.size() != 0) {
    throw ConfigError(
        format("[sequence parallel] the sequence has {} positions, must be divisible "
               "by {} ranks",
               length, group.size()));
  }
  const int64_t share = length / group.size();
  return {group.rank() * share, (group.rank() + 1) * share};
}

SequenceGather::SequenceGather(const at::Tensor& part, const comm::Group& group)
    : part_(part.detach().contiguous()) {
  std::vector<int64_t> sizes = part_.sizes().vec();
  sizes.insert(sizes.begin(), group.size());
  blocks_ = at::empty(sizes, part_.options());
  work_ = comm::all_gather(blocks_, part_, group, {.tag = "parts of a sequence"});
}

at::Tensor SequenceGather::wait() {
  work_.wait();
  std::vector<int64_t> sizes = part_.sizes().vec();
  sizes[sizes.size() - 2] *= blocks_.size(0);
  // Without rows before the sequence the blocks lie as they should.
  return blocks_.movedim(0, blocks_.dim() - 3).reshape(sizes);
}

SequenceReduction::SequenceReduction(const at::Tensor& whole, const comm::Group& group) {
  const at::Tensor parts = as_parts(whole.detach(), group);
  blocks_ = parts.movedim(parts.dim() - 3, 0).contiguous();
  part_ = at::empty(blocks_.sizes().slice(1), blocks_.options());
  work_ = comm::reduce_scatter(part_, blocks_, group, {.tag = "sum to parts of a sequence"});
}

at::Tensor SequenceReduction::wait() {
  work_.wait();
  blocks_.reset();
  return part_;
}

SharedInputGradient::SharedInputGradient(const at::Tensor& partial, const Sharing& sharing) {
  if (sharing.sequence_parallel) {
    part_.emplace(partial, sharing.group);
  } else {
    whole_ = partial;
    work_ = comm::all_reduce(whole_, sharing.group, {.tag = "tensor-parallel gradient"});
  }
}

at::Tensor SharedInputGradient::wait() {
  if (part_) return part_->wait();
  work_.wait();
  return whole_;
}

at::Tensor sum_outputs(const at::Tensor& partial, const Sharing& sharing) {
  return sharing.sequence_parallel ? SumToParts::apply(partial, sharing.group)
                                   : SumOverRanks::apply(partial, sharing.group);
}

}  // namespace lockstep::nn
