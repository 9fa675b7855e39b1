// SPDX-License-Identifier: Apache-2.0
#include <ATen/core/Tensor.h>

#include <stdexcept>

#include "lockstep/nn/float8/float8_cuda.h"

namespace lockstep::nn::cuda {
namespace {

[[noreturn]] void no_float8() {
  throw std::logic_error("lockstep bug: no CUDA kernels in this build");
}

}  // namespace

std::string float8_missing(c10::Device) {
  return "this Lockstep was built without its CUDA kernels";
}
at::Tensor float8_amax(const at::Tensor&) { no_float8(); }
std::tuple<at::Tensor, at::Tensor, at::Tensor> float8_cast(const at::Tensor&, const at::Tensor&,
                                                           Float8, Float8Layout) {
  no_float8();
}
at::Tensor float8_transpose(const at::Tensor&) { no_float8(); }
at::Tensor float8_product(const Float8Operand&, const Float8Operand&, const Float8ProductOptions&) {
  no_float8();
}

}  // namespace lockstep::nn::cuda
