// SPDX-License-Identifier: Apache-2.0
// A vector for each token.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <ostream>

#include "lockstep/nn/tensor/sharing.h"

namespace lockstep::nn {

// Computes what torch::nn::Embedding does. The weight begins without values: initialize() gives
// them.
class EmbeddingImpl : public torch::nn::Cloneable<EmbeddingImpl>, public SharedLayer {
 public:
  EmbeddingImpl(int64_t count, int64_t width, at::TensorOptions tensors = {});

  at::Tensor forward(const at::Tensor& indices);  // (...) -> (..., width)
  // The vectors of 0, 1, ... length - 1, as a view: for positions. With sequence parallelism, of
  // this rank's part of them.
  at::Tensor first(int64_t length) const;
  // The products of vectors with all of its own (..., width) -> (..., count), as a linear map that
  // has the same weight; shared by tensor-parallel ranks, with this rank's.
  at::Tensor logits(const at::Tensor& vectors) const;

  bool supports(layout::TensorStyle style) const override;
  void reset() override;
  void pretty_print(std::ostream& stream) const override;

  at::Tensor weight;  // (count, width)

 private:
  int64_t count_, width_;
  at::TensorOptions tensors_;
};
TORCH_MODULE(Embedding);

}  // namespace lockstep::nn
