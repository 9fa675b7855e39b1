// SPDX-License-Identifier: Apache-2.0
#include "lockstep/nn/activations.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/memory/threads/parallel_for.h"
#include "lockstep/nn/autograd/one_derivative.h"
#include "lockstep/nn/kernels/activation_kernels.h"
#include "lockstep/nn/kernels/fused_cuda.h"

namespace lockstep::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr int64_t kElementsPerThread = 1 << 15;

bool has_cpu_kernel(const at::Tensor& tensor) {
  return tensor.is_cpu() && tensor.scalar_type() == at::kFloat;
}

const float* read(const at::Tensor& tensor) { return tensor.data_ptr<float>(); }
float* write(const at::Tensor& tensor) { return tensor.data_ptr<float>(); }

struct Gelu : torch::autograd::Function<Gelu> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input) {
    context->save_for_backward({input});
    if (!has_cpu_kernel(input)) return at::gelu(input, "tanh");
    const at::Tensor x = input.contiguous();
    at::Tensor out = at::empty_like(x);
    memory::parallel_for(x.numel(), kElementsPerThread, [&](int64_t begin, int64_t end) {
      activation_kernels().gelu(read(x) + begin, write(out) + begin, end - begin);
    });
    return out;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    require_one_derivative("gelu");
    const at::Tensor input = context->get_saved_variables()[0];
    if (!has_cpu_kernel(input)) return {at::gelu_backward(gradients[0], input, "tanh")};
    const at::Tensor x = input.contiguous(), grad = gradients[0].contiguous();
    const at::Tensor grad_x = at::empty_like(x);
    memory::parallel_for(x.numel(), kElementsPerThread, [&](int64_t begin, int64_t end) {
      activation_kernels().gelu_backward(read(x) + begin, read(grad) + begin, write(grad_x) + begin,
                                         end - begin);
    });
    return {grad_x};
  }
};

// Calls body(first element of gate_up, first element of the half as wide, elements) for each row.
template <class Body>
void for_gate_rows(const at::Tensor& gate_up, Body body) {
  const int64_t width = gate_up.size(-1) / 2;
  if (gate_up.numel() == 0) return;
  const int64_t rows = gate_up.numel() / (2 * width);
  memory::parallel_for(rows, std::max<int64_t>(kElementsPerThread / width, 1),
                       [&](int64_t begin, int64_t end) {
                         for (int64_t row = begin; row < end; ++row) {
                           body(row * 2 * width, row * width, width);
                         }
                       });
}

struct SwiGlu : torch::autograd::Function<SwiGlu> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input) {
    context->save_for_backward({input});
    if (cuda::has_fused_kernels(input)) return cuda::swiglu(input.contiguous());
    if (!has_cpu_kernel(input)) {
      const auto halves = input.chunk(2, -1);
      return at::silu(halves[0]).mul_(halves[1]);
    }
    const at::Tensor gate_up = input.contiguous();
    auto sizes = gate_up.sizes().vec();
    sizes.back() /= 2;
    at::Tensor out = at::empty(sizes, gate_up.options());
    for_gate_rows(gate_up, [&](int64_t wide, int64_t narrow, int64_t width) {
      const float* gate = read(gate_up) + wide;
      activation_kernels().swiglu(gate, gate + width, write(out) + narrow, width);
    });
    return out;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    require_one_derivative("swiglu");
    const at::Tensor input = context->get_saved_variables()[0];
    const at::Tensor& grad = gradients[0];
    if (cuda::has_fused_kernels(input)) {
      return {cuda::swiglu_backward(input.contiguous(), grad.contiguous())};
    }
    if (!has_cpu_kernel(input)) {
      const auto halves = input.chunk(2, -1);
      return {at::cat({at::silu_backward(grad * halves[1], halves[0]), grad * at::silu(halves[0])},
                      -1)};
    }
    const at::Tensor gate_up = input.contiguous(), dense = grad.contiguous();
    const at::Tensor out = at::empty_like(gate_up);
    for_gate_rows(gate_up, [&](int64_t wide, int64_t narrow, int64_t width) {
      const float* gate = read(gate_up) + wide;
      float* grad_gate = write(out) + wide;
      activation_kernels().swiglu_backward(gate, gate + width, read(dense) + narrow, grad_gate,
                                           grad_gate + width, width);
    });
    return {out};
  }
};

}  // namespace

at::Tensor gelu(const at::Tensor& x) { return Gelu::apply(x); }

at::Tensor swiglu(const at::Tensor& gate_up) {
  if (gate_up.dim() < 1 || gate_up.size(-1) % 2 != 0) {
    throw ConfigError(format("[swiglu] the input is ({}), must have an even last dimension",
                             join(gate_up.sizes())));
  }
  return SwiGlu::apply(gate_up);
}

}  // namespace lockstep::nn
