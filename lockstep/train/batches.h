// SPDX-License-Identifier: Apache-2.0
// Batches as tensors on a device. Private: not installed.
#pragma once

#include <ATen/core/Tensor.h>

#include "lockstep/data/batch.h"

namespace lockstep::train {

struct Tensors {
  at::Tensor input;   // (rows, seq_len)
  at::Tensor target;  // (rows * seq_len)
};

Tensors to_tensors(const data::Batch& batch, int64_t seq_len, c10::Device device);

}  // namespace lockstep::train
