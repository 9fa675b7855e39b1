// SPDX-License-Identifier: Apache-2.0
// The layers of a language model: all of them in one model, or cut into the stages of a pipeline.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "lockstep/config/model/model_spec.h"
#include "lockstep/model/decoding.h"
#include "lockstep/model/language_model.h"
#include "lockstep/nn/random/random_context.h"
#include "lockstep/parallel/pipeline/layer.h"

namespace lockstep::model {

// Embeddings, spec.layers blocks, and the head: from tokens (B, T) to logits (B, T, V), of which
// tensor-parallel ranks have their columns. Together
// they have the parameters of spec.tensors(), by the same names. `random` is what their dropout
// depends on. Blocks can be computed again. The spec must be resolved. While `decoding` has spans,
// the layers go from their tokens (1, N) to the logits that it wants, (1, M, V).
std::vector<parallel::Layer> language_model_layers(const config::ModelSpec& spec,
                                                   at::TensorOptions tensors,
                                                   std::shared_ptr<nn::RandomContext> random,
                                                   std::shared_ptr<Decoding> decoding = {});

}  // namespace lockstep::model
