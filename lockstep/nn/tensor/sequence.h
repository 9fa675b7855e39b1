// SPDX-License-Identifier: Apache-2.0
// A sequence that ranks share: the dimension before the last, in equal parts. Private: not
// installed.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "lockstep/comm/group.h"
#include "lockstep/comm/work.h"
#include "lockstep/layout/box.h"
#include "lockstep/nn/tensor/sharing.h"

namespace lockstep::nn {

// This rank's part of `length` positions. ConfigError where the parts are not equal.
layout::Range sequence_part(int64_t length, const comm::Group& group);

// All parts, while something else is computed. Not recorded by autograd.
class SequenceGather {
 public:
  SequenceGather(const at::Tensor& part, const comm::Group& group);
  at::Tensor wait();

 private:
  at::Tensor part_, blocks_;
  comm::Work work_;
};

// The sum of all ranks' tensors, of which each gets its part; likewise.
class SequenceReduction {
 public:
  SequenceReduction(const at::Tensor& whole, const comm::Group& group);
  at::Tensor wait();

 private:
  at::Tensor blocks_, part_;
  comm::Work work_;
};

// The gradient of the input of a layer whose outputs ranks share, on its way to being that of all
// ranks' outputs; likewise, in the memory of `partial`.
class SharedInputGradient {
 public:
  SharedInputGradient(const at::Tensor& partial, const Sharing& sharing);
  at::Tensor wait();

 private:
  std::optional<SequenceReduction> part_;
  at::Tensor whole_;
  comm::Work work_;
};

// The sum of all ranks' outputs of a layer, in the memory of `partial`, which must have no other
// use; backward passes the gradient on, which is the same on all ranks. With sequence parallelism
// each rank gets its part of the sum, and backward puts the parts' gradients together.
at::Tensor sum_outputs(const at::Tensor& partial, const Sharing& sharing);

}  // namespace lockstep::nn
