// A vector for each token.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <ostream>

namespace lockstep::nn {

// Computes what torch::nn::Embedding does. The weight begins without values: initialize() gives
// them.
class EmbeddingImpl : public torch::nn::Cloneable<EmbeddingImpl> {
 public:
  EmbeddingImpl(int64_t count, int64_t width, at::TensorOptions tensors = {});

  at::Tensor forward(const at::Tensor& indices) const;  // (...) -> (..., width)

  void reset() override;
  void pretty_print(std::ostream& stream) const override;

  at::Tensor weight;  // (count, width)

 private:
  int64_t count_, width_;
  at::TensorOptions tensors_;
};
TORCH_MODULE(Embedding);

}  // namespace lockstep::nn
