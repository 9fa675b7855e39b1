#include "lockstep/nn/embedding.h"

#include <ATen/ATen.h>

namespace lockstep::nn {

EmbeddingImpl::EmbeddingImpl(int64_t count, int64_t width, at::TensorOptions tensors)
    : count_(count), width_(width), tensors_(tensors) {
  reset();
}

void EmbeddingImpl::reset() {
  weight = register_parameter("weight", at::empty({count_, width_}, tensors_));
}

at::Tensor EmbeddingImpl::forward(const at::Tensor& indices) const {
  return at::embedding(weight, indices);
}

void EmbeddingImpl::pretty_print(std::ostream& stream) const {
  stream << "lockstep::nn::Embedding(" << count_ << ", " << width_ << ")";
}

}  // namespace lockstep::nn
