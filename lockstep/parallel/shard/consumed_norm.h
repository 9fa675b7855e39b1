// SPDX-License-Identifier: Apache-2.0
// Gradients of models whose parameters are updated in backward. Private: not installed.
#pragma once

#include "lockstep/parallel/shard/fully_shard.h"

namespace lockstep::parallel::detail {

// Throws where the gradients of a backward are gone, so that nothing would be clipped.
void require_clipping(const ShardedModel& model);
// Of the gradients that were updated with in backward since it was last asked for; collective.
double consumed_norm(const ShardEngine& engine);

}  // namespace lockstep::parallel::detail
