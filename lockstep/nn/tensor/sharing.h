// SPDX-License-Identifier: Apache-2.0
// What tensor-parallel ranks share of a layer. parallel::tensor_parallel() says so; models need not
// know.
#pragma once

#include <cstdint>
#include <optional>

#include "lockstep/comm/group.h"
#include "lockstep/layout/box.h"
#include "lockstep/layout/tensor_plan.h"

namespace lockstep::nn {

struct Sharing {
  comm::Group group;
  layout::TensorStyle style;
  // Outside the matrices that ranks share, each has its part of the sequence: of the dimension
  // before the last.
  bool sequence_parallel = false;
  layout::Range rows = {};  // vocab: this rank's of the weight
};

// Whether the input of a layer is this rank's part of the sequence, and all parts are needed.
inline bool gathers_input(const std::optional<Sharing>& sharing) {
  return sharing && sharing->style != layout::TensorStyle::row && sharing->sequence_parallel;
}

// A layer that can be shared. Its parameters are then this rank's part of the whole ones.
class SharedLayer {
 public:
  virtual ~SharedLayer() = default;
  virtual bool supports(layout::TensorStyle style) const = 0;

  // How many ranks share its outputs: 8 heads of a projection are 8 / ranks() here.
  int64_t ranks() const { return sharing ? sharing->group.size() : 1; }

  std::optional<Sharing> sharing;

 protected:
  SharedLayer() = default;
  SharedLayer(const SharedLayer&) = default;
};

}  // namespace lockstep::nn
