// SPDX-License-Identifier: Apache-2.0
// What ranks tell each other at the end of a step. Private: not installed.
#pragma once

#include <ATen/core/Tensor.h>

#include "lockstep/mesh/mesh.h"

namespace lockstep::train {

struct StepSums {
  double loss = 0;
  bool stop = false;
};

// One exchange for the losses of all micro-batches, which are summed in the order of the batch, and
// for whether any rank was asked to stop. `losses` are doubles on the CPU. Collective.
StepSums combine(const at::Tensor& losses, bool stop, const mesh::Mesh& mesh);

}  // namespace lockstep::train
