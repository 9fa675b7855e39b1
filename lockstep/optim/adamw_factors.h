// SPDX-License-Identifier: Apache-2.0
// The numbers that one step of AdamW has for all elements of a parameter. Private: not installed.
#pragma once

#include "lockstep/optim/adamw.h"
#include "lockstep/optim/kernels/kernels.h"

namespace lockstep::optim {

struct AdamWStep {
  int64_t step;  // from 1
  double lr;
  double weight_decay;
};
AdamWFactors adamw_factors(const AdamWOptions& options, const AdamWStep& now);

// ConfigError.
void validate(const AdamWOptions& options);

}  // namespace lockstep::optim
