// SPDX-License-Identifier: Apache-2.0
// GPT-2, Llama, Mistral, Qwen2 and Qwen3, as config::ModelSpec describes them: the model, its
// weights, and text from it.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/config/model/model_spec.h"
#include "lockstep/layout/parallel_config.h"
#include "lockstep/nn/init_model.h"
#include "lockstep/nn/random/random_context.h"
#include "lockstep/parallel/pipeline/layer.h"
#include "lockstep/parallel/recompute/recompute.h"

namespace lockstep::model {

using layout::Recompute;
class Decoding;

struct LanguageModelOptions {
  at::TensorOptions tensors = {};  // dtype and device of the parameters
  // selective: of each block all but its products and attention is computed again in backward;
  // full: the whole block is.
  Recompute recompute = Recompute::none;
  // Where the inputs of what is computed again are kept; none: in memory.
  std::shared_ptr<parallel::ActivationStore> store = {};
};

// Parameters are those of spec.tensors(), by the same names, and begin without values:
// initialize() or load_hugging_face() gives them.
class LanguageModelImpl : public torch::nn::Module {
 public:
  // The spec must be resolved.
  explicit LanguageModelImpl(config::ModelSpec spec, LanguageModelOptions options = {});

  // Tokens (B, T), at most spec().positions long, to logits (B, T, V). Rows that hold several
  // documents, which do not see each other, have the position of each token in its document too,
  // (B, T) on the CPU: data::Batch::positions.
  at::Tensor forward(const at::Tensor& tokens, const at::Tensor& positions = {});

  const config::ModelSpec& spec() const { return spec_; }
  // Where in the run the model is, which its dropout depends on. Set it before each forward.
  nn::RandomContext& random() { return *random_; }
  // For programs in this tree, which have model/decoding.h: the texts that it generates, and what
  // generates them.
  const std::shared_ptr<Decoding>& decoding() const { return decoding_; }
  const std::vector<parallel::LayerForward>& layers() const { return layers_; }

 private:
  config::ModelSpec spec_;
  std::shared_ptr<nn::RandomContext> random_;
  std::shared_ptr<Decoding> decoding_;
  std::vector<parallel::LayerForward> layers_;
};

class LanguageModel : public torch::nn::ModuleHolder<LanguageModelImpl> {
 public:
  using torch::nn::ModuleHolder<LanguageModelImpl>::ModuleHolder;
  explicit LanguageModel(config::ModelSpec spec, LanguageModelOptions options = {})
      : ModuleHolder(std::make_shared<LanguageModelImpl>(std::move(spec), options)) {}
};

// Initial values as the spec says, a function of (seed, name, index) alone.
void initialize(LanguageModelImpl& model, uint64_t seed);
// The same for one parameter at a time, by the source's seed and name.
nn::InitializeRule initial_values(const config::ModelSpec& spec);

// Fills the model's parameters from a folder with model.safetensors, or an index and several files,
// converting to the parameters' dtype. CheckpointError for tensors that are missing or of another
// shape. The spec is that of the folder's config.json: config::model_spec_from_hf.
void load_hugging_face(LanguageModelImpl& model, const std::string& folder);
// The same for one parameter at a time: a rule that fills the parameter of the source's name.
nn::InitializeRule hugging_face_values(const config::ModelSpec& spec, const std::string& folder);

struct GenerateOptions {
  int64_t tokens = 400;
  double temperature = 0.8;  // 0: always the most likely one
  // What is drawn from, after the temperature and in this order, as transformers does it: the k
  // most likely (0: all), then the fewest whose probabilities sum to top_p, then those with at
  // least min_p times the largest probability.
  int64_t top_k = 40;
  double top_p = 1, min_p = 0;
  // Above 1: tokens that the text has are less likely.
  double repetition_penalty = 1;
  uint64_t seed = 1;
  int64_t vocab = 0;  // only tokens below this; 0: all that the model has
};

// Calls `emit` with each new token, until it returns false. Keys and values are kept, so that a
// token costs one token's work. A text that is longer than spec().positions continues from its last
// half. The model is in eval mode. The prompt must have a token, and fewer than spec().positions.
void generate(LanguageModelImpl& model, std::vector<int64_t> prompt, const GenerateOptions& options,
              const std::function<bool(int64_t token)>& emit);

}  // namespace lockstep::model
