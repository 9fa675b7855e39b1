// SPDX-License-Identifier: Apache-2.0
// GPT-2 and Llama, as config::ModelSpec describes them.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "lockstep/config/model/model_spec.h"
#include "lockstep/model/layers.h"
#include "lockstep/nn/init_model.h"
#include "lockstep/nn/random/random_context.h"

namespace lockstep::model {

// Parameters are those of spec.tensors(), by the same names, and begin without values:
// initialize() or load_hugging_face() gives them.
class LanguageModelImpl : public torch::nn::Module {
 public:
  // The spec must be resolved.
  explicit LanguageModelImpl(config::ModelSpec spec, LanguageModelOptions options = {});

  // Tokens (B, T), at most spec().positions long, to logits (B, T, V).
  at::Tensor forward(const at::Tensor& tokens);

  const config::ModelSpec& spec() const { return spec_; }
  // Where in the run the model is, which its dropout depends on. Set it before each forward.
  nn::RandomContext& random() { return *random_; }

 private:
  config::ModelSpec spec_;
  std::shared_ptr<nn::RandomContext> random_;
  std::vector<parallel::LayerForward> layers_;
};

class LanguageModel : public torch::nn::ModuleHolder<LanguageModelImpl> {
 public:
  using torch::nn::ModuleHolder<LanguageModelImpl>::ModuleHolder;
  explicit LanguageModel(config::ModelSpec spec, LanguageModelOptions options = {})
      : ModuleHolder(std::make_shared<LanguageModelImpl>(std::move(spec), options)) {}
};

// First values as the spec says, a function of (seed, name, index) alone.
void initialize(LanguageModelImpl& model, uint64_t seed);
// The same for one parameter at a time, by the source's seed and name.
nn::InitializeRule initial_values(const config::ModelSpec& spec);

}  // namespace lockstep::model
