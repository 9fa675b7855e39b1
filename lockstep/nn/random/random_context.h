// SPDX-License-Identifier: Apache-2.0
// What the random layers of a model share: the seed, and where in the run it is.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "lockstep/core/philox.h"
#include "lockstep/core/torch_fwd.h"
#include "lockstep/layout/box.h"

namespace lockstep::nn {

// Set by the training loop, before each forward. Models that run at the same time (ranks that
// are threads, replicas) have one each. Two ways to be independent of the number of ranks:
//   - micro_batch counts over all ranks, and a micro-batch is always of the same rows; or
//   - rows says which rows of the step's whole batch the tensors hold, and micro_batch stays 0.
// Rows must be outermost in memory, as in (B, T, C) or (B * T, C).
struct RandomContext {
  uint64_t seed = 0;
  RunPosition position = {};
  std::optional<layout::Range> rows = {};
  // Context parallelism: tensors (B, T, C) hold the tokens of each row that `token_rank` of so many
  // ranks has, chunks token_rank and 2 token_ranks - 1 - token_rank of 2 token_ranks.
  int token_ranks = 1, token_rank = 0;
};

// A layer that draws. Its numbers are a function of the context, of `layer_name`, which must be
// its own in the model, and of nothing else: called twice at one position it draws the same twice,
// which is what recomputation needs.
class RandomLayer {
 public:
  virtual ~RandomLayer() = default;

  std::string layer_name;
  std::shared_ptr<const RandomContext> context;

 protected:
  RandomLayer() = default;
  RandomLayer(std::string layer_name, std::shared_ptr<const RandomContext> context);
  RandomLayer(const RandomLayer&) = default;

  // Throws ConfigError without a name or a context.
  RandomKey key(std::string_view purpose) const;
};

// Gives every random layer of the model the context, and as its name its path in the model, behind
// `prefix` ("blocks.4." for a block that is built alone). Clones of the model share the context
// until they are attached to another.
void attach_random(torch::nn::Module& model, std::shared_ptr<const RandomContext> context,
                   std::string_view prefix = {});

}  // namespace lockstep::nn
