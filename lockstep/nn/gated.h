// The gated activation of Llama's MLP.
#pragma once

#include "lockstep/core/torch_fwd.h"

namespace lockstep::nn {

// (..., 2 F) -> (..., F): silu of the first half times the second half. Keeps only its input for
// backward. Differentiable once.
at::Tensor swiglu(const at::Tensor& gate_up);

}  // namespace lockstep::nn
