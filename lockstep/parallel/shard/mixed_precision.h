// SPDX-License-Identifier: Apache-2.0
// Which types parameters are gathered, computed and reduced in. Private: not installed.
#pragma once

#include <ATen/core/Tensor.h>

#include "lockstep/parallel/flat/flat_plan.h"
#include "lockstep/parallel/shard/options.h"

namespace lockstep::parallel::detail {

// Fills in the types that follow from the plan's dtype. Where the CPU's libtorch cannot multiply
// matrices of the wanted type, parameters travel in it and are computed in float32; the first time,
// that is logged.
void choose_types(FlatPlan& plan, const MixedPrecision& precision);

}  // namespace lockstep::parallel::detail
