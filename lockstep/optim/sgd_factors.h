// SPDX-License-Identifier: Apache-2.0
// The numbers that one step of SGD has for all elements of a parameter. Private: not installed.
#pragma once

#include "lockstep/optim/kernels/kernels.h"
#include "lockstep/optim/sgd.h"

namespace lockstep::optim {

detail::SgdKind sgd_kind(const SGDOptions& options);
struct SgdStep {
  int64_t step;  // from 1
  double lr;
  double weight_decay;
};
detail::SgdFactors sgd_factors(const SGDOptions& options, const SgdStep& now);

// ConfigError.
void validate(const SGDOptions& options);

}  // namespace lockstep::optim
