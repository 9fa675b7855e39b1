// SPDX-License-Identifier: Apache-2.0
// Notices gradients that were scaled by another factor on every rank between a backward and the
// step: what clipping by the norm of this rank's shards alone does. Private: not installed.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "lockstep/parallel/flat/flat.h"

namespace lockstep::parallel::detail {

// Compares a few elements of a few gradients. What changed them otherwise than by one factor
// (noise, a limit for each element) is no mistake, and neither is a factor that all ranks have.
class ScalingWatch {
 public:
  void start(const std::vector<std::unique_ptr<Flat>>& flats);
  // Gradients are the optimizer's.
  void after_reduction();
  // Shards are about to be written; only the first call after after_reduction() matters.
  void before_step();

  // For the sum over all ranks: how this rank's gradients were scaled before the last step.
  static constexpr size_t kFacts = 3;
  std::array<int64_t, kFacts> facts() const;
  // Error where the sum says that ranks differ by more than a hundredth.
  void require_same(std::span<const int64_t, kFacts> sum) const;

 private:
  at::Tensor samples() const;
  std::optional<double> factor(const at::Tensor& now) const;

  std::vector<const at::Tensor*> shards_;  // of the flats: whose gradients are looked at
  int64_t reductions_ = 0;
  at::Tensor before_;             // undefined: nothing is compared
  std::optional<double> factor_;  // of the last step; none: unknown
};

}  // namespace lockstep::parallel::detail
