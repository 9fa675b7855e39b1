// Brings an operation into the form that plain engines (MPI, Gloo) can run.
#pragma once

#include <functional>
#include <memory>

#include "lockstep/fabric/operation.h"

namespace lockstep::comm::detail {

struct Adapted {
  fabric::Operation operation;
  std::shared_ptr<const void> memory;
  std::function<void()> finish;  // to call when it is done; may be empty
};

// After this a reduction is a sum, product, min or max of float64, float32, int64, int32, int8 or
// uint8: 16-bit floats are widened to float32 and rounded once at the end, avg becomes a sum and a
// division, bool becomes uint8. `rank` is this one: where a reduce leaves no result, nothing is
// written.
Adapted adapt_reduction(fabric::Operation operation, std::shared_ptr<const void> memory, int rank,
                        int group_size);

}  // namespace lockstep::comm::detail
