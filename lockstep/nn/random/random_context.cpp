// SPDX-License-Identifier: Apache-2.0
#include "lockstep/nn/random/random_context.h"

#include <torch/nn/module.h>

#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::nn {

RandomLayer::RandomLayer(std::string layer_name, std::shared_ptr<const RandomContext> context)
    : layer_name(std::move(layer_name)), context(std::move(context)) {}

RandomKey RandomLayer::key(std::string_view purpose) const {
  if (!context) {
    throw ConfigError(
        format("[{}] {} has no RandomContext; attach_random(model, context) gives it one", purpose,
               layer_name.empty() ? "a layer of the model" : "layer '" + layer_name + "'"));
  }
  if (layer_name.empty()) {
    throw ConfigError(
        format("[{}] the layer has no name, so it would draw what others draw; "
               "attach_random(model, context) gives it one",
               purpose));
  }
  return random_key(context->seed, purpose, layer_name, context->position);
}

void attach_random(torch::nn::Module& model, std::shared_ptr<const RandomContext> context,
                   std::string_view prefix) {
  model.apply([&](const std::string& path, torch::nn::Module& module) {
    if (auto* layer = dynamic_cast<RandomLayer*>(&module)) {
      layer->layer_name = std::string(prefix) + path;
      layer->context = context;
    }
  });
}

}  // namespace lockstep::nn
