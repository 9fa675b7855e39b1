// SPDX-License-Identifier: Apache-2.0
// What a configuration may say about offloading.
#pragma once

#include "lockstep/config/train_config.h"

namespace lockstep::config {

// Throws ConfigError for the first rule that is broken. The sizes of this machine are not looked
// at; the folder neither (check_inputs does).
void validate_offload(const TrainConfig& config);

}  // namespace lockstep::config
