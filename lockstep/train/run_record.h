// SPDX-License-Identifier: Apache-2.0
// What a run writes down about itself when it starts. Private: not installed.
#pragma once

#include <c10/core/Device.h>

#include <string>

#include "lockstep/comm/group.h"
#include "lockstep/config/train_config.h"

namespace lockstep::train {

// What every checkpoint of the run keeps, as rank 0 has it: paths may differ between hosts.
struct RunRecord {
  std::string config;     // JSON, without the path of the run folder
  std::string tokenizer;  // JSON; empty for "bytes"
};

// Adds a line to environment.jsonl in the run folder, if there is one: versions, hosts and devices
// of all ranks, command line, commit. Collective.
RunRecord record_start(const config::TrainConfig& config, const comm::Group& world,
                       c10::Device device);
// Makes the configuration that of the run folder, once the run is sure to begin. Collective.
void commit_start(const config::TrainConfig& config, const comm::Group& world);

}  // namespace lockstep::train
