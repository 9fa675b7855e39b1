// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lockstep/config/schema/schema.h"
#include "lockstep/config/train_config.h"

namespace lockstep::config {

// The parts of train_schema() for what backward computes again.
void add_recompute(Schema& schema, RunConfig& train);
void add_tile(Schema& schema, RunConfig& train);

}  // namespace lockstep::config
