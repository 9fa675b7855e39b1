// SPDX-License-Identifier: Apache-2.0
#include "lockstep/train/batches.h"

#include <ATen/ATen.h>

#include "lockstep/nn/context/context.h"

namespace lockstep::train {

Tensors to_tensors(const data::Batch& batch, int64_t seq_len, c10::Device device,
                   const comm::Group& context) {
  const auto rows_of = [&](const std::vector<int64_t>& values) {
    return at::tensor(values, at::kLong).view({batch.rows, seq_len});
  };
  at::Tensor input = rows_of(batch.input), target = rows_of(batch.target), positions;
  if (!batch.positions.empty()) positions = rows_of(batch.positions);
  if (context.size() > 1) {
    // Targets are those of whole rows, so that no chunk lacks the target of its last token.
    if (!positions.defined())
      positions = at::arange(seq_len, at::kLong).expand({batch.rows, seq_len}).contiguous();
    const at::Tensor places =
        at::tensor(nn::context_places(seq_len, context.size(), context.rank()), at::kLong);
    input = input.index_select(1, places);
    target = target.index_select(1, places);
  }
  return {input.to(device), target.flatten().to(device), positions};
}

std::vector<at::Tensor> Tensors::inputs() const {
  if (!positions.defined()) return {input};
  return {input, positions};
}

}  // namespace lockstep::train
