// SPDX-License-Identifier: Apache-2.0
// The layers of a language model: all of them in one model, or cut into the stages of a pipeline.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/config/model/model_spec.h"
#include "lockstep/model/decoding.h"
#include "lockstep/model/language_model.h"
#include "lockstep/nn/context/context.h"
#include "lockstep/nn/random/random_context.h"
#include "lockstep/parallel/pipeline/layer.h"

namespace lockstep::model {

// The loss of logits (B, t, V) of the tokens that a rank has of each row, from token `begin` on, as
// a scalar.
using LossOfTokens = std::function<at::Tensor(const at::Tensor& logits, int64_t begin)>;

// Long rows: blocks and the head compute `size` tokens of each row at once. Where `loss` is set,
// the head takes it, gives the sum of the losses of all tokens instead of logits, and unsets it.
struct Tiling {
  int64_t size = 0;  // 0: all tokens
  LossOfTokens loss = {};
};

// Embeddings, spec.layers blocks, and the head: from tokens (B, T) to logits (B, T, V), of which
// tensor-parallel ranks have their columns. Together
// they have the parameters of spec.tensors(), by the same names. `random` is what their dropout
// depends on. Blocks can be computed again. Packed rows have a second tensor, which all layers but
// the head pass on: the positions that nn::documents_of() takes, (B, T) on the CPU. Ranks of
// `context` have their tokens of each row, and that tensor always. The spec must
// be resolved. While `decoding` has spans, the layers go from their tokens (1, N) to the logits
// that it wants, (1, M, V).
std::vector<parallel::Layer> language_model_layers(const config::ModelSpec& spec,
                                                   at::TensorOptions tensors,
                                                   std::shared_ptr<nn::RandomContext> random,
                                                   std::shared_ptr<Decoding> decoding = {},
                                                   const nn::ContextRanks& context = {},
                                                   std::shared_ptr<Tiling> tiling = {});

}  // namespace lockstep::model
