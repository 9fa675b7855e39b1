// SPDX-License-Identifier: Apache-2.0
// Attention of ranks that share the tokens of each row, in a ring. Private: not installed.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "lockstep/nn/context/attention_tiles.h"

namespace lockstep::nn {

// q is (1, H, M, D), k and v (1, K, M, D), of this rank's tokens; gives (1, H, M, D). Keys and
// values go around the ring while the attention to those at hand is computed, and so do their
// gradients in backward. Collective, both ways. Differentiable once.
at::Tensor ring_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const std::shared_ptr<const Ring>& ring);

}  // namespace lockstep::nn
