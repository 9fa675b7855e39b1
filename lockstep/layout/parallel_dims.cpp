// SPDX-License-Identifier: Apache-2.0
#include "lockstep/layout/parallel_dims.h"

#include <limits>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::layout {

int64_t ParallelDims::world_size() const {
  int64_t product = 0;
  const bool overflow = __builtin_mul_overflow(int64_t{dp} * tp, int64_t{pp}, &product);
  return overflow ? std::numeric_limits<int64_t>::max() : product;
}

std::string ParallelDims::describe() const { return format("dp {} x tp {} x pp {}", dp, tp, pp); }

void ParallelDims::validate() const {
  if (dp < 1 || tp < 1 || pp < 1) {
    throw ConfigError(format("[parallel_dims] {}: every size must be at least 1", describe()));
  }
}

void ParallelDims::validate(int world_size) const {
  validate();
  if (this->world_size() != world_size) {
    throw ConfigError(format("[parallel_dims] {} = {}, must equal world size {}", describe(),
                             this->world_size(), world_size));
  }
}

}  // namespace lockstep::layout
