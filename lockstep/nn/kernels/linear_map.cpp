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
#include "lockstep/nn/kernels/decode_kernels.h"

namespace lockstep::nn {
namespace {

bool are_few(const at::Tensor& input, const at::Tensor& weight) {
  const at::ScalarType type = weight.scalar_type();
  return !at::GradMode::is_enabled() && weight.is_cpu() && weight.dim() == 2 &&
         weight.is_contiguous() && (type == at::kFloat || type == at::kBFloat16) &&
         input.scalar_type() == type && input.numel() > 0 &&
         input.numel() <= kMostVectors * weight.size(1);
}

// What at::autocast asks, whose function has another name in each version.
bool is_autocast() {
  return !c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::AutocastCPU);
}

template <class T>
void multiply(const DecodeKernels<T>& kernels, const void* weight, const at::Tensor& x,
              const at::Tensor& out) {
  constexpr int64_t kGrain = 1 << 16;  // elements of the matrix for each start of a thread
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

// An operator: the parameters of a sharded or offloaded model are gathered for operators.
TORCH_LIBRARY_FRAGMENT(lockstep, library) {
  library.def("linear_of_few(Tensor input, Tensor weight, Tensor bias) -> Tensor");
  library.impl("linear_of_few", c10::DispatchKey::CPU, TORCH_FN(multiply_few));
}

}  // namespace

at::Tensor linear_map(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias) {
  if (!are_few(input, weight) || is_autocast()) return at::linear(input, weight, bias);
  static const auto linear_of_few =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("lockstep::linear_of_few", "")
          .typed<at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&)>();
  // Older versions do not take an undefined tensor.
  return linear_of_few.call(input, weight, bias.defined() ? bias : at::empty({0}, input.options()));
}

}  // namespace lockstep::nn
