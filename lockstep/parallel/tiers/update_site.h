// SPDX-License-Identifier: Apache-2.0
// Where updates are faster. Private: not installed.
#pragma once

#include "lockstep/parallel/tiers/offload_tiers.h"

namespace lockstep::parallel::detail {

// Seconds for an element's update with its transfers, of state that rests on the host.
struct SiteTimes {
  double cpu = 0, device = 0;
};

// Updates a small tensor a few times at either site. `elements`: of a slice.
SiteTimes measure_sites(const std::shared_ptr<OffloadTiers>& tiers, int64_t elements);

// What the options ask for, or the faster one.
layout::UpdateSite choose_site(const std::shared_ptr<OffloadTiers>& tiers, int64_t elements);

}  // namespace lockstep::parallel::detail
