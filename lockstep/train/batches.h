// SPDX-License-Identifier: Apache-2.0
// Batches as tensors on a device. Private: not installed.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/data/batch.h"

namespace lockstep::train {

struct Tensors {
  at::Tensor input;   // (rows, seq_len)
  at::Tensor target;  // (rows * seq_len)
  // Of packed rows, and where ranks share rows, (rows, seq_len) of whole rows on the CPU:
  // data::Batch::positions.
  at::Tensor positions = {};

  // What the first layer is given.
  std::vector<at::Tensor> inputs() const;
};

// With `context`, this rank's tokens of each row, and their targets.
Tensors to_tensors(const data::Batch& batch, int64_t seq_len, c10::Device device,
                   const comm::Group& context = {});

}  // namespace lockstep::train
