// SPDX-License-Identifier: Apache-2.0
#include "lockstep/nn/kernels/linear_map.h"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

#include "lockstep/memory/threads/parallel_for.h"
#include "lockstep/nn/kernels/decode_cuda.h"
#include "lockstep/nn/kernels/decode_kernels.h"

namespace lockstep::nn {
namespace {

// What at::autocast asks, whose function has another name in each version.
bool is_autocast(const at::Tensor& input) {
  return !c10::impl::tls_is_dispatch_key_excluded(input.is_cpu() ? c10::DispatchKey::AutocastCPU
                                                                 : c10::DispatchKey::AutocastCUDA);
}

bool are_few(const at::Tensor& input) {
  const at::ScalarType type = input.scalar_type();
  const bool known = input.is_cpu() ? type == at::kFloat || type == at::kBFloat16
                                    : cuda::has_decode_kernels(input);
  return known && !at::GradMode::is_enabled() && input.numel() > 0 &&
         input.numel() <= kMostVectors * input.size(-1) && !is_autocast(input);
}

template <class T>
void multiply(const DecodeKernels<T>& kernels, const void* weight, const at::Tensor& x,
              const at::Tensor& out) {
  // Elements of the matrix for each start of a thread, which takes as long as reading some 1e5.
  constexpr int64_t kGrain = 1 << 18;
  const int64_t vectors = x.size(0), width = x.size(1), rows = out.size(1);
  memory::parallel_for(rows, std::max<int64_t>(kGrain / width, 1), [&](int64_t begin, int64_t end) {
    kernels.multiply(static_cast<const T*>(weight), x.data_ptr<float>(), out.data_ptr<float>(),
                     vectors, width, rows, begin, end);
  });
}

at::Tensor multiply_few(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias) {
  const at::Tensor x = input.reshape({-1, weight.size(1)}).to(at::kFloat).contiguous();
  at::Tensor out = at::empty({x.size(0), weight.size(0)}, x.options());
  if (weight.scalar_type() == at::kFloat) {
    multiply(float_decode_kernels(), weight.data_ptr(), x, out);
  } else {
    multiply(bfloat16_decode_kernels(), weight.data_ptr(), x, out);
  }
  if (bias.numel() > 0) out.add_(bias);
  std::vector<int64_t> sizes = input.sizes().vec();
  sizes.back() = weight.size(0);
  return out.to(input.scalar_type()).view(sizes);
}

// An empty tensor is none: older versions do not take an undefined one.
at::Tensor defined(const at::Tensor& empty) { return empty.numel() > 0 ? empty : at::Tensor(); }

at::Tensor fuse_few(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
                    const at::Tensor& norm_weight, const at::Tensor& norm_bias, double epsilon,
                    int64_t activation, const at::Tensor& residual) {
  return cuda::few_linear(input, {.weight = weight,
                                  .bias = defined(bias),
                                  .norm_weight = defined(norm_weight),
                                  .norm_bias = defined(norm_bias),
                                  .epsilon = epsilon,
                                  .activation = static_cast<FusedLinear::Activation>(activation),
                                  .residual = defined(residual)});
}

at::Tensor multiply_few_cuda(const at::Tensor& input, const at::Tensor& weight,
                             const at::Tensor& bias) {
  return cuda::few_linear(input, {.weight = weight, .bias = defined(bias)});
}

// Operators: the parameters of a sharded or offloaded model are gathered for operators.
TORCH_LIBRARY_FRAGMENT(lockstep, library) {
  library.def("linear_of_few(Tensor input, Tensor weight, Tensor bias) -> Tensor");
  library.impl("linear_of_few", c10::DispatchKey::CPU, TORCH_FN(multiply_few));
  library.impl("linear_of_few", c10::DispatchKey::CUDA, TORCH_FN(multiply_few_cuda));
  library.def(
      "fused_linear_of_few(Tensor input, Tensor weight, Tensor bias, Tensor norm_weight, "
      "Tensor norm_bias, float epsilon, int activation, Tensor residual) -> Tensor");
  library.impl("fused_linear_of_few", c10::DispatchKey::CUDA, TORCH_FN(fuse_few));
}

}  // namespace

at::Tensor linear_map(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias) {
  if (!are_few(input) || weight.dim() != 2 || !weight.is_contiguous() ||
      weight.scalar_type() != input.scalar_type() || weight.device() != input.device()) {
    return at::linear(input, weight, bias);
  }
  static const auto linear_of_few =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("lockstep::linear_of_few", "")
          .typed<at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&)>();
  return linear_of_few.call(input, weight, bias.defined() ? bias : at::empty({0}, input.options()));
}

bool can_fuse(const at::Tensor& input) { return !input.is_cpu() && are_few(input); }

at::Tensor fused_linear(const at::Tensor& input, const FusedLinear& linear) {
  static const auto fused_linear_of_few =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("lockstep::fused_linear_of_few", "")
          .typed<at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                            const at::Tensor&, const at::Tensor&, double, int64_t,
                            const at::Tensor&)>();
  const auto given = [none = at::empty({0}, input.options())](const at::Tensor& tensor) {
    return tensor.defined() ? tensor : none;
  };
  return fused_linear_of_few.call(
      input, linear.weight, given(linear.bias), given(linear.norm_weight), given(linear.norm_bias),
      linear.epsilon, static_cast<int64_t>(linear.activation), given(linear.residual));
}

}  // namespace lockstep::nn
