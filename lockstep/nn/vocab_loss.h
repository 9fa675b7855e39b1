// SPDX-License-Identifier: Apache-2.0
// Cross entropy of logits whose vocabulary tensor-parallel ranks share. Private: not installed.
#pragma once

#include <ATen/core/Tensor.h>

#include "lockstep/nn/loss.h"

namespace lockstep::nn {

// As cross_entropy(), with this rank's columns of the logits. Two small all-reduces, of one and of
// two numbers for each row; none in backward.
at::Tensor vocab_cross_entropy(const at::Tensor& logits, const at::Tensor& targets,
                               const CrossEntropyOptions& options);

}  // namespace lockstep::nn
