// SPDX-License-Identifier: Apache-2.0
// Cross entropy of a language model.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "lockstep/comm/group.h"
#include "lockstep/data/batch.h"

namespace lockstep::nn {

using data::kIgnoredTarget;

struct CrossEntropyOptions {
  double scale = 1;  // of the sum: 1 / (tokens of the whole batch) gives their mean
  // The logits' memory may be used for their gradient: for a caller that has no further use for
  // them, as a training step, which so needs the largest tensor of the model once, not three times.
  bool overwrite_logits = false;
  // Ranks that share the vocabulary: the logits are this rank's columns of `vocab` ones, in nearly
  // equal shares. They are never gathered. Collective; the result is the same on all.
  comm::Group group = {};
  int64_t vocab = 0;
};

// scale * sum of -log softmax(logits)[target] over the rows of (N, V) logits whose target of (N)
// counts, as a float32 scalar, computed in float32. Differentiable once.
at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& targets,
                         const CrossEntropyOptions& options = {});

}  // namespace lockstep::nn
