// SPDX-License-Identifier: Apache-2.0
// Parameters of offloaded models: within budgets, and from host memory. Private: not installed.
#pragma once

#include "lockstep/parallel/flat/gathered_residence.h"

namespace lockstep::parallel::detail {

// Gathered or cast for each use, like GatheredResidence.
class OffloadedResidence : public GatheredResidence {
 public:
  using GatheredResidence::GatheredResidence;

 protected:
  at::Tensor line_memory(at::ScalarType dtype, c10::Device device) override;
  bool has_room() const override;
  void begin(bool beside_computation) override;
  OffloadTiers& tiers() const { return *plan_.offload->tiers; }
};

// This rank's alone and as the model sees them: copied from host memory by a queue.
class HostResidence final : public OffloadedResidence {
 public:
  using OffloadedResidence::OffloadedResidence;

 protected:
  void begin(bool beside_computation) override;
  void wait() override;
  void finish() override {}

 private:
  memory::Event fetched_;
};

}  // namespace lockstep::parallel::detail
