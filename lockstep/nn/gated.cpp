#include "lockstep/nn/gated.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/nn/fused_cuda.h"

namespace lockstep::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct SwiGlu : torch::autograd::Function<SwiGlu> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& gate_up) {
    context->save_for_backward({gate_up});
    if (cuda::has_fused_kernels(gate_up)) return cuda::swiglu(gate_up.contiguous());
    const auto halves = gate_up.chunk(2, -1);
    return at::silu(halves[0]).mul_(halves[1]);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const at::Tensor gate_up = context->get_saved_variables()[0];
    const at::Tensor& grad = gradients[0];
    if (cuda::has_fused_kernels(gate_up))
      return {cuda::swiglu_backward(gate_up.contiguous(), grad.contiguous())};
    const auto halves = gate_up.chunk(2, -1);
    return {
        at::cat({at::silu_backward(grad * halves[1], halves[0]), grad * at::silu(halves[0])}, -1)};
  }
};

}  // namespace

at::Tensor swiglu(const at::Tensor& gate_up) {
  if (gate_up.dim() < 1 || gate_up.size(-1) % 2 != 0) {
    throw ConfigError(format("[swiglu] the input is ({}), must have an even last dimension",
                             join(gate_up.sizes())));
  }
  return SwiGlu::apply(gate_up);
}

}  // namespace lockstep::nn
