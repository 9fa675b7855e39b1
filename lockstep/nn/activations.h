// SPDX-License-Identifier: Apache-2.0
// The activations of language models. Both keep only their input for backward, and can be
// differentiated once.
#pragma once

#include "lockstep/core/torch_fwd.h"

namespace lockstep::nn {

// GPT-2's: x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))).
at::Tensor gelu(const at::Tensor& x);

// Llama's gate, (..., 2 F) -> (..., F): silu of the first half times the second half.
at::Tensor swiglu(const at::Tensor& gate_up);

}  // namespace lockstep::nn
