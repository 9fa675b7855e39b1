// SPDX-License-Identifier: Apache-2.0
// What a run says of itself before its first step. Private: not installed.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/config/input_files.h"
#include "lockstep/config/train_config.h"
#include "lockstep/train/trained_model.h"

namespace lockstep::train {

struct StartFacts {
  const config::TrainConfig& config;
  const comm::Group& world;
  const TrainedModel& model;
  const config::Data& data;
  const std::string& threads;
  c10::Device device;
  int64_t global_batch, accumulation, samples;
  const std::string& resumed_from;  // empty: nothing
  int64_t done;                     // steps
};

std::vector<std::string> start_lines(const StartFacts& facts);

}  // namespace lockstep::train
