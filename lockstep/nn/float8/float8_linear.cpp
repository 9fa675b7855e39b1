// SPDX-License-Identifier: Apache-2.0
#include "lockstep/nn/float8/float8_linear.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <utility>

#include "lockstep/comm/collectives.h"
#include "lockstep/core/trace.h"
#include "lockstep/nn/autograd/capsule.h"
#include "lockstep/nn/autograd/gradient_sum.h"
#include "lockstep/nn/autograd/one_derivative.h"
#include "lockstep/nn/kernels/amax_note.h"
#include "lockstep/nn/tensor/sequence.h"

namespace lockstep::nn {
namespace {

using layout::TensorStyle;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Scales are those of the one-process run: where a rank has a part of the tensor, of all parts.
at::Tensor agreed(at::Tensor amax, const std::optional<Sharing>& sharing) {
  if (sharing) {
    comm::all_reduce(amax, sharing->group, {.op = comm::ReduceOp::max, .tag = "fp8 scale"}).wait();
  }
  return amax;
}
at::Tensor amax_of(const at::Tensor& matrix, const std::optional<Sharing>& sharing, bool is_part) {
  at::Tensor amax = take_amax(matrix);
  if (!amax.defined()) amax = float8_amax(matrix);
  return is_part ? agreed(std::move(amax), sharing) : amax;
}

Float8Codes codes_of(const at::Tensor& weight, const std::optional<Sharing>& sharing) {
  if (weight.is_cuda()) notes_amax() = true;
  const at::Tensor amax = agreed(float8_amax(weight), sharing);
  const Float8Matrix matrix = float8_cast(weight, amax, Float8::e4m3, Float8Layout::rows);
  return {.operand = {matrix.codes, matrix.inverse}, .amax = amax, .kept = false};
}

// What backward needs besides the codes of the input, which autograd keeps.
struct Float8Call {
  std::optional<Sharing> sharing;
  GradientSum sum;  // of the weight
  Float8Codes weight;
  at::Tensor inverse;  // of the input
  at::ScalarType input_type, bias_type;
  int64_t width;
};

bool is_column(const std::optional<Sharing>& sharing) {
  return sharing && sharing->style != TensorStyle::row;
}

struct Float8Linear : torch::autograd::Function<Float8Linear> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input,
                            const at::Tensor& weight, const at::Tensor& bias,
                            const at::Tensor& added, const std::optional<Sharing>& sharing,
                            Float8Weight* codes, bool adds_gradient) {
    const bool gather = gathers_input(sharing), row = sharing && !is_column(sharing);
    const bool keeps = weight.requires_grad();
    const at::Tensor matrix = as_matrix(input.detach());
    const at::Tensor amax = amax_of(matrix, sharing, gather || row);
    const Float8Matrix x = float8_cast(matrix, amax, Float8::e4m3,
                                       keeps && !gather ? Float8Layout::both : Float8Layout::rows);
    Float8Call call{
        .sharing = sharing,
        .sum = adds_gradient ? GradientSum(weight) : GradientSum(),
        .weight = codes == nullptr ? codes_of(weight, sharing) : codes->of(weight, sharing),
        .inverse = x.inverse,
        .input_type = input.scalar_type(),
        .bias_type = bias.scalar_type(),
        .width = input.size(-1)};
    std::vector<int64_t> sizes = input.sizes().vec();
    at::Tensor rows = x.codes;
    if (gather) {
      const at::Tensor whole = SequenceGather(x.codes.view(sizes), sharing->group).wait();
      sizes = whole.sizes().vec();
      rows = as_matrix(whole);
    }
    at::Tensor out =
        float8_product({rows, x.inverse}, call.weight.operand,
                       {.type = input.scalar_type(),
                        .fast = true,
                        .bias = bias.numel() == 0 ? at::Tensor() : bias,
                        .added = added.numel() == 0 ? at::Tensor() : as_matrix(added)});
    // The weight too: autograd notices that it was changed before backward.
    context->save_for_backward({!keeps   ? at::Tensor()
                                : gather ? x.codes.view(input.sizes())
                                         : x.transposed,
                                weight});
    if (!call.weight.kept) call.weight.operand.codes.reset();
    save_value(*context, "call", std::move(call));
    sizes.back() = out.size(1);
    return out.view(sizes);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    require_one_derivative("linear");
    variable_list results(7);
    results[3] = gradients[0];
    if (!gradients[0].defined()) return results;
    const bool wants_input = context->needs_input_grad(0),
               wants_weight = context->needs_input_grad(1);
    const auto saved = context->get_saved_variables();
    const auto call = saved_value<Float8Call>(*context, "call");
    const bool gather = gathers_input(call.sharing) && wants_weight;
    std::optional<SequenceGather> gathered;
    if (gather) gathered.emplace(saved[0], call.sharing->group);
    const at::Tensor gradient = as_matrix(gradients[0]);
    Float8Matrix grad;
    if (wants_input || wants_weight) {
      grad = float8_cast(gradient, amax_of(gradient, call.sharing, is_column(call.sharing)),
                         Float8::e5m2,
                         !wants_input    ? Float8Layout::transposed
                         : !wants_weight ? Float8Layout::rows
                                         : Float8Layout::both);
    }
    std::optional<SharedInputGradient> arriving;
    if (wants_input) {
      std::vector<int64_t> sizes = gradients[0].sizes().vec();
      sizes.back() = call.width;
      results[0] = float8_product({grad.codes, grad.inverse, grad.kind},
                                  {transposed_weight(saved[1], call), call.weight.operand.inverse},
                                  {.type = call.input_type})
                       .view(sizes);
      if (is_column(call.sharing)) arriving.emplace(results[0], *call.sharing);
    }
    if (wants_weight) {
      const at::Tensor x = gather ? float8_transpose(as_matrix(gathered->wait())) : saved[0];
      const trace::Span span("tensor", "weight gradient");
      const at::ScalarType type = saved[1].scalar_type();
      const at::Tensor sum = call.sum.place(type);
      const at::Tensor product =
          float8_product({grad.transposed, grad.inverse, grad.kind}, {x, call.inverse},
                         {.type = type, .added = sum, .in_place = sum.defined()});
      if (!sum.defined()) results[1] = product;
    }
    if (context->needs_input_grad(2)) results[2] = gradient.sum(0).to(call.bias_type);
    if (arriving) results[0] = arriving->wait();
    return results;
  }

 private:
  static at::Tensor transposed_weight(const at::Tensor& weight, const Float8Call& call) {
    if (call.weight.kept) return float8_transpose(call.weight.operand.codes);
    return float8_cast(weight, call.weight.amax, Float8::e4m3, Float8Layout::transposed).transposed;
  }
};

}  // namespace

Float8Codes Float8Weight::of(const at::Tensor& weight, const std::optional<Sharing>& sharing) {
  // The key of parameters whose memory is there only for an operator.
  if (weight.key_set().has(c10::DispatchKey::DeferredInit)) return codes_of(weight, sharing);
  if (weight_.is_same(weight) && data_ == weight.data_ptr() && version_ == weight._version())
    return codes_;
  *this = {};
  codes_ = codes_of(weight, sharing);
  codes_.kept = true;
  weight_ = weight;
  data_ = weight.data_ptr();
  version_ = weight._version();
  return codes_;
}

at::Tensor float8_linear(const at::Tensor& input, const at::Tensor& weight, const LinearCall& call,
                         Float8Weight* codes) {
  const auto or_empty = [&](const at::Tensor& tensor) {
    return tensor.defined() ? tensor : at::empty({0}, weight.options());
  };
  return Float8Linear::apply(input, weight, or_empty(call.bias), or_empty(call.added), call.sharing,
                             codes, call.adds_gradient);
}

}  // namespace lockstep::nn
