// SPDX-License-Identifier: Apache-2.0
#include "lockstep/nn/embedding.h"

#include <ATen/ATen.h>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/nn/kernels/linear_map.h"
#include "lockstep/nn/tensor/column_linear.h"
#include "lockstep/nn/tensor/sequence.h"

namespace lockstep::nn {

EmbeddingImpl::EmbeddingImpl(int64_t count, int64_t width, at::TensorOptions tensors)
    : count_(count), width_(width), tensors_(tensors) {
  reset();
}

void EmbeddingImpl::reset() {
  weight = register_parameter("weight", at::empty({count_, width_}, tensors_));
}

at::Tensor EmbeddingImpl::forward(const at::Tensor& indices) {
  if (!sharing) return at::embedding(weight, indices);
  if (sharing->style == layout::TensorStyle::sequence) {
    if (!sharing->sequence_parallel) return at::embedding(weight, indices);
    const layout::Range part = sequence_part(indices.size(-1), sharing->group);
    return at::embedding(weight, indices.narrow(-1, part.begin, part.size()));
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
  return column_linear(vectors, weight, {}, *sharing);
}

bool EmbeddingImpl::supports(layout::TensorStyle style) const {
  return style == layout::TensorStyle::vocab || style == layout::TensorStyle::sequence;
}

void EmbeddingImpl::pretty_print(std::ostream& stream) const {
  stream << "lockstep::nn::Embedding(" << count_ << ", " << width_ << ")";
}

}  // namespace lockstep::nn
