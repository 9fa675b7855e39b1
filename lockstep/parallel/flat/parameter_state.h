// SPDX-License-Identifier: Apache-2.0
// Where the values of a sharded parameter are.
#pragma once

namespace lockstep::parallel {

enum class ParameterState {
  sharded,    // every rank has its shard, and nobody the whole
  gathering,  // the whole is on its way to this rank
  gathered,   // the whole is in this rank's memory
  resharding  // the whole is being dropped
};

}  // namespace lockstep::parallel
