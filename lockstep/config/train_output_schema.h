// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lockstep/config/schema/schema.h"
#include "lockstep/config/train_config.h"

namespace lockstep::config {

constexpr Limits kFromZero{.min = 0};

// The part of train_schema() for what a run writes.
void add_output(Schema& schema, TrainConfig& config);

}  // namespace lockstep::config
