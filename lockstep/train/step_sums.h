// SPDX-License-Identifier: Apache-2.0
// What ranks tell each other at the end of a step. Private: not installed.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "lockstep/mesh/mesh.h"
#include "lockstep/train/stop_request.h"

namespace lockstep::train {

// What a rank adds to the exchange: measured, of this step.
struct RankFigures {
  Stop stop = Stop::none;  // that it was asked for
  double busy_ms = 0;      // without waiting for others
  int64_t peak_bytes = 0;
};

struct StepSums {
  double loss = 0;
  Stop stop = Stop::none;            // of all ranks
  std::vector<double> busy_ms = {};  // of each rank
  std::vector<int64_t> peak_bytes = {};
};

// One exchange for the losses of all micro-batches, which are summed in the order of the batch, and
// for what ranks have measured. `losses` are doubles on the CPU. Collective.
StepSums combine(const at::Tensor& losses, const RankFigures& mine, const mesh::Mesh& mesh);

}  // namespace lockstep::train
