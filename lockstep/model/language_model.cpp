// SPDX-License-Identifier: Apache-2.0
#include "lockstep/model/language_model.h"

#include <ATen/ATen.h>

#include <map>

#include "lockstep/core/error.h"
#include "lockstep/model/layers.h"
#include "lockstep/nn/init.h"

namespace lockstep::model {

LanguageModelImpl::LanguageModelImpl(config::ModelSpec spec, LanguageModelOptions options)
    : spec_(std::move(spec)),
      random_(std::make_shared<nn::RandomContext>()),
      decoding_(std::make_shared<Decoding>()) {
  layers_ =
      parallel::build_layers(language_model_layers(spec_, options.tensors, random_, decoding_),
                             *this, options.recompute, {.random = random_, .store = options.store});
}

at::Tensor LanguageModelImpl::forward(const at::Tensor& tokens, const at::Tensor& positions) {
  parallel::Tensors x{tokens};
  if (positions.defined()) x.push_back(positions);
  for (const parallel::LayerForward& layer : layers_) x = layer(x);
  return x[0];
}

nn::InitializeRule initial_values(const config::ModelSpec& spec) {
  std::map<std::string, config::TensorSpec> tensors;
  for (const config::TensorSpec& tensor : spec.tensors()) tensors.emplace(tensor.name, tensor);
  return
      [tensors = std::move(tensors)](const at::Tensor& parameter, const nn::init::Source& source) {
        const config::TensorSpec& tensor = tensors.at(source.name);
        const layout::Shape shape = source.slice ? source.slice->shape : parameter.sizes().vec();
        check(shape == tensor.shape, "a model has the shapes of its spec");
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
