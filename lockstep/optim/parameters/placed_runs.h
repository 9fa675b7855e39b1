// SPDX-License-Identifier: Apache-2.0
// Where the elements of a parameter lie in the tensors of the whole model. Private: not installed.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/optim/parameters/parameters.h"

namespace lockstep::optim::detail {

// `count` elements of a parameter from `begin` on. In the whole tensor they are runs of `length`
// neighbours, of which the first begins at `first` and each `stride` after the one before.
struct PlacedRuns {
  std::string tensor;
  int64_t begin, count;
  int64_t first, length, stride;
};

// Those of all parts, ascending by `begin`. ConfigError for a part that is not in the parameter.
std::vector<PlacedRuns> placed_runs(const NamedParameter& parameter);

}  // namespace lockstep::optim::detail
