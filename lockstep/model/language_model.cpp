#include "lockstep/model/language_model.h"

#include <ATen/ATen.h>

#include <cmath>
#include <map>
#include <numbers>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/nn/heads.h"
#include "lockstep/nn/init.h"

namespace lockstep::model {
namespace {

using config::ModelKind;

// theta^(-2i/D). With Llama 3's scaling, waves longer than the sequences of the first training are
// stretched by the factor, short ones are left, and those between are blended.
std::vector<double> rotary_frequencies(const config::ModelSpec& spec) {
  std::vector<double> frequencies;
  const int64_t width = spec.head_dim();
  for (int64_t i = 0; i < width; i += 2) {
    double frequency =
        std::pow(spec.rope_theta, -static_cast<double>(i) / static_cast<double>(width));
    if (const auto& scaling = spec.rope_scaling) {
      const double wave = 2 * std::numbers::pi / frequency;
      const double turns = static_cast<double>(scaling->original_positions) / wave;
      const double kept = (turns - scaling->low_freq_factor) /
                          (scaling->high_freq_factor - scaling->low_freq_factor);
      const double share = std::clamp(kept, 0.0, 1.0);
      frequency = share * frequency + (1 - share) * frequency / scaling->factor;
    }
    frequencies.push_back(frequency);
  }
  return frequencies;
}

}  // namespace

LanguageModelImpl::LanguageModelImpl(config::ModelSpec spec, LanguageModelOptions options)
    : spec_(std::move(spec)),
      options_(options),
      random_(std::make_shared<nn::RandomContext>()),
      embed_(nullptr),
      dropout_(spec_.dropout) {
  Parts parts(spec_, options.tensors);
  embed_ = parts.embedding(*this, "embed");
  if (spec_.kind == ModelKind::gpt) {
    positions_ = parts.embedding(*this, "positions");
  } else {
    rotation_ =
        nn::rotary_table(rotary_frequencies(spec_), spec_.positions).to(options.tensors.device());
  }
  register_module("dropout", dropout_);
  const auto blocks = register_module("blocks", std::make_shared<torch::nn::Module>());
  for (int64_t layer = 0; layer < spec_.layers; ++layer) {
    blocks_.push_back(blocks->register_module(std::to_string(layer),
                                              Block(parts, layer, options.recompute, random_)));
  }
  norm_ = parts.norm(*this, "", "norm");
  head_ = spec_.is_tied() ? embed_->weight : parts.linear(*this, "", "head")->weight;
  nn::attach_random(*this, random_);
}

at::Tensor LanguageModelImpl::forward(const at::Tensor& tokens) {
  const int64_t length = tokens.size(1);
  if (tokens.dim() != 2 || length > spec_.positions) {
    throw ConfigError(format("[LanguageModel] tokens are ({}), must be (B, T) with T at most {}",
                             join(tokens.sizes()), spec_.positions));
  }
  at::Tensor x = embed_(tokens);
  if (!positions_.is_empty()) x = x + positions_->weight.narrow(0, 0, length);
  x = dropout_(x);
  for (Block& block : blocks_) x = block(x, rotation_);
  return at::linear(norm_(x), head_);
}

nn::InitializeRule initial_values(const config::ModelSpec& spec) {
  std::map<std::string, config::TensorSpec> tensors;
  for (const config::TensorSpec& tensor : spec.tensors()) tensors.emplace(tensor.name, tensor);
  return [tensors = std::move(tensors)](const at::Tensor& parameter,
                                        const nn::init::Source& source) {
    const config::TensorSpec& tensor = tensors.at(source.name);
    check(parameter.sizes() == at::IntArrayRef(tensor.shape), "a model has the shapes of its spec");
    switch (tensor.init) {
      case config::InitKind::normal:
        nn::init::normal_(parameter, source, {.std = tensor.std});
        break;
      case config::InitKind::ones:
        nn::init::constant_(parameter, 1);
        break;
      case config::InitKind::zeros:
        nn::init::constant_(parameter, 0);
        break;
    }
    return true;
  };
}

void initialize(LanguageModelImpl& model, uint64_t seed) {
  const nn::InitializeRule fill = initial_values(model.spec());
  for (const auto& item : model.named_parameters())
    fill(item.value(), {.seed = seed, .name = item.key()});
}

}  // namespace lockstep::model
