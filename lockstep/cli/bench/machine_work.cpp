// SPDX-License-Identifier: Apache-2.0
#include "lockstep/cli/bench/machine_work.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <vector>

#include "lockstep/config/tensor_parallel.h"
#include "lockstep/model/language_model.h"
#include "lockstep/nn/attention.h"
#include "lockstep/nn/linear.h"
#include "lockstep/nn/loss.h"
#include "lockstep/nn/norm.h"
#include "lockstep/parallel/tensor/tensor.h"

namespace lockstep::cli {
namespace {

model::LanguageModel built(size_t layers, const WorkSizes& sizes,
                           const at::TensorOptions& tensors) {
  const config::ModelSpec spec = config::ModelSpec{.kind = config::ModelKind::llama,
                                                   .layers = static_cast<int64_t>(layers),
                                                   .hidden = sizes.hidden,
                                                   .heads = sizes.hidden / 64,
                                                   .vocab = sizes.vocab}
                                     .resolved(sizes.length, sizes.vocab);
  model::LanguageModel model(spec, {.tensors = tensors});
  model::initialize(*model, 1);
  for (const auto& module : model->modules())  // as the trainer has it
    if (auto* const linear = module->as<nn::LinearImpl>()) linear->adds_gradient = true;
  return model;
}

at::Tensor stream_of(const WorkSizes& sizes, const at::TensorOptions& tensors) {
  return at::randn({sizes.batch, sizes.length, sizes.hidden}, tensors).requires_grad_();
}

}  // namespace

std::function<void()> block_work(const WorkSizes& sizes, const at::TensorOptions& tensors,
                                 size_t blocks, const comm::Group* sharing) {
  model::LanguageModel model = built(blocks, sizes, tensors);
  if (sharing != nullptr)
    parallel::tensor_parallel(model, *sharing, config::tensor_plan(model->spec()));
  const at::Tensor input = stream_of(sizes, tensors), gradient = at::randn_like(input);
  return [=]() mutable {
    parallel::Tensors x{input};
    for (size_t i = 1; i <= blocks; ++i) x = model->layers()[i](x);
    x[0].backward(gradient);
  };
}

std::function<void()> head_work(const WorkSizes& sizes, const at::TensorOptions& tensors) {
  model::LanguageModel model = built(1, sizes, tensors);
  const at::Tensor input = stream_of(sizes, tensors);
  const at::Tensor targets =
      at::randint(sizes.vocab, {sizes.batch * sizes.length}, tensors.dtype(at::kLong));
  return [=]() mutable {
    const at::Tensor logits = model->layers().back()({input})[0];
    nn::cross_entropy(
        logits.flatten(0, 1), targets,
        {.scale = 1.0 / static_cast<double>(targets.numel()), .overwrite_logits = true})
        .backward();
  };
}

std::function<void()> stream_work(const WorkSizes& sizes, const at::TensorOptions& tensors) {
  nn::RmsNorm norm(sizes.hidden, nn::NormOptions{.tensors = tensors});
  const at::Tensor input = stream_of(sizes, tensors), gradient = at::randn_like(input);
  return [=]() mutable {
    at::Tensor x = input;
    for (int i = 0; i < 2; ++i) {
      const auto [inner, around] = norm->fork(x);
      x = around + inner;
    }
    torch::autograd::grad({x}, {input}, {gradient});
  };
}

std::function<void()> attention_work(const WorkSizes& sizes, const at::TensorOptions& tensors,
                                     int64_t heads) {
  std::vector<at::Tensor> qkv;
  for (int i = 0; i < 3; ++i)
    qkv.push_back(at::randn({sizes.batch, heads, sizes.length, sizes.hidden / heads}, tensors)
                      .requires_grad_());
  const at::Tensor gradient = at::randn_like(qkv[0]);
  return [=] {
    torch::autograd::grad({nn::causal_attention(qkv[0], qkv[1], qkv[2])}, qkv, {gradient});
  };
}

}  // namespace lockstep::cli
