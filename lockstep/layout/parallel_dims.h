// SPDX-License-Identifier: Apache-2.0
// Sizes of the three parallel axes.
#pragma once

#include <cstdint>
#include <string>

namespace lockstep::layout {

struct ParallelDims {
  int dp = 1;  // replicas of the model, each with its own data
  int tp = 1;  // parts of every large matrix
  int pp = 1;  // stages of consecutive layers

  // dp * tp * pp; the largest int64_t where that does not fit.
  int64_t world_size() const;
  std::string describe() const;  // "dp 2 x tp 2 x pp 3"

  // Throws ConfigError unless every size is at least 1 and, in the second form, their product is
  // the world size.
  void validate() const;
  void validate(int world_size) const;

  bool operator==(const ParallelDims&) const = default;
};

}  // namespace lockstep::layout
