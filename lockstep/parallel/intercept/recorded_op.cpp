// SPDX-License-Identifier: Apache-2.0
#include "lockstep/parallel/intercept/recorded_op.h"

#include <ATen/ATen.h>

namespace lockstep::parallel::detail {

at::Tensor tensor_over(const c10::Storage& storage, const at::Tensor& like) {
  at::Tensor tensor = at::empty({0}, like.options().device(storage.device()).requires_grad(false));
  return tensor.set_(storage, like.storage_offset(), like.sizes(), like.strides());
}

at::Tensor bytes_of(const at::Tensor& tensor) {
  const auto size = static_cast<int64_t>(tensor.storage().nbytes());
  at::Tensor bytes = at::empty({0}, at::dtype(at::kByte).device(tensor.device()));
  return bytes.set_(tensor.storage(), 0, {size}, {1});
}

c10::Storage new_storage(const at::Tensor& tensor, c10::Device device) {
  const auto size = static_cast<int64_t>(tensor.storage().nbytes());
  return at::empty({size}, at::dtype(at::kByte).device(device)).storage();
}

}  // namespace lockstep::parallel::detail
