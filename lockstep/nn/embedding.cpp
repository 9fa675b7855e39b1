// SPDX-License-Identifier: Apache-2.0
#include "lockstep/nn/embedding.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/nn/kernels/fused_cuda.h"
#include "lockstep/nn/kernels/linear_map.h"
#include "lockstep/nn/tensor/recorded_linear.h"
#include "lockstep/nn/tensor/sequence.h"

namespace lockstep::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct FusedEmbedding : torch::autograd::Function<FusedEmbedding> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& table,
                            const at::Tensor& indices) {
    context->save_for_backward({indices});
    context->saved_data["rows"] = table.size(0);
    return at::embedding(table, indices);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    if (!gradients[0].defined()) return {at::Tensor(), at::Tensor()};
    const at::Tensor indices = context->get_saved_variables()[0];
    const int64_t rows = context->saved_data["rows"].toInt();
    return {at::GradMode::is_enabled()  // a derivative of this one is wanted
                ? at::embedding_dense_backward(gradients[0], indices, rows, -1, false)
                : cuda::embedding_gradient(gradients[0], indices, rows),
            at::Tensor()};
  }
};

at::Tensor look_up(const at::Tensor& table, const at::Tensor& indices) {
  return cuda::has_embedding_gradient(table) ? FusedEmbedding::apply(table, indices)
                                             : at::embedding(table, indices);
}

}  // namespace

EmbeddingImpl::EmbeddingImpl(int64_t count, int64_t width, at::TensorOptions tensors)
    : count_(count), width_(width), tensors_(tensors) {
  reset();
}

void EmbeddingImpl::reset() {
  weight = register_parameter("weight", at::empty({count_, width_}, tensors_));
}

at::Tensor EmbeddingImpl::forward(const at::Tensor& indices) {
  if (!sharing) return look_up(weight, indices);
  if (sharing->style == layout::TensorStyle::sequence) {
    if (!sharing->sequence_parallel) return look_up(weight, indices);
    const layout::Range part = sequence_part(indices.size(-1), sharing->group);
    return look_up(weight, indices.narrow(-1, part.begin, part.size()));
  }
  // On a device they would have to be waited for.
  if (indices.is_cpu() && indices.lt(0).logical_or_(indices.ge(count_)).any().item<bool>()) {
    throw ConfigError(format("[embedding] indices go from {} to {}, must be from 0 to {}",
                             indices.min().item<int64_t>(), indices.max().item<int64_t>(),
                             count_ - 1));
  }
  // Others' vectors are 0 here, and arrive by the sum.
  const at::Tensor places = indices - sharing->rows.begin;
  const at::Tensor others = places.lt(0).logical_or_(places.ge(sharing->rows.size()));
  const at::Tensor partial =
      at::embedding(weight, places.masked_fill(others, 0)).masked_fill(others.unsqueeze(-1), 0);
  return sum_outputs(partial, *sharing);
}

at::Tensor EmbeddingImpl::first(int64_t length) const {
  if (sharing && sharing->style == layout::TensorStyle::vocab)
    throw ConfigError(
        "[embedding] first() of an embedding whose rows are shared, must have style "
        "sequence");
  if (!sharing || !sharing->sequence_parallel) return weight.narrow(0, 0, length);
  const layout::Range part = sequence_part(length, sharing->group);
  return weight.narrow(0, part.begin, part.size());
}

at::Tensor EmbeddingImpl::logits(const at::Tensor& vectors) const {
  if (!sharing || sharing->style != layout::TensorStyle::vocab)
    return linear_map(vectors, weight, {});
  return recorded_linear(vectors, weight, {.sharing = sharing});
}

bool EmbeddingImpl::supports(layout::TensorStyle style) const {
  return style == layout::TensorStyle::vocab || style == layout::TensorStyle::sequence;
}

void EmbeddingImpl::pretty_print(std::ostream& stream) const {
  stream << "lockstep::nn::Embedding(" << count_ << ", " << width_ << ")";
}

}  // namespace lockstep::nn
