// SPDX-License-Identifier: Apache-2.0
#include "lockstep/optim/tensor_memory.h"

namespace lockstep::optim::detail {

std::optional<DType> dtype_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kDouble:
      return DType::float64;
    case at::kFloat:
      return DType::float32;
    case at::kHalf:
      return DType::float16;
    case at::kBFloat16:
      return DType::bfloat16;
    default:
      return std::nullopt;
  }
}

bool same_layout(const at::Tensor& a, const at::Tensor& b) {
  if (a.sizes() != b.sizes()) return false;
  for (int64_t dim = 0; dim < a.dim(); ++dim) {  // the stride of a single row does not matter
    if (a.size(dim) > 1 && a.stride(dim) != b.stride(dim)) return false;
  }
  return true;
}

Operands operands_of(const Update& update) {
  const auto memory = [](const at::Tensor& tensor) {
    return tensor.defined() ? tensor.data_ptr() : nullptr;
  };
  const auto buffer = [&](size_t i) {
    return i < update.buffers.size() ? memory(update.buffers[i]) : nullptr;
  };
  return {.param = memory(update.param),
          .grad = memory(update.grad),
          .master = memory(update.master),
          .first = buffer(0),
          .second = buffer(1)};
}

}  // namespace lockstep::optim::detail
