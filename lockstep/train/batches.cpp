// SPDX-License-Identifier: Apache-2.0
#include "lockstep/train/batches.h"

#include <ATen/ATen.h>

namespace lockstep::train {

Tensors to_tensors(const data::Batch& batch, int64_t seq_len, c10::Device device) {
  const auto tensor = [&](const std::vector<int64_t>& values) {
    return at::tensor(values, at::kLong).to(device);
  };
  return {tensor(batch.input).view({batch.rows, seq_len}), tensor(batch.target)};
}

}  // namespace lockstep::train
