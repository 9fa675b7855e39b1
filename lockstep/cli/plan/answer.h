// SPDX-License-Identifier: Apache-2.0
// What the planner says about one layout, for people and for programs.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "lockstep/config/plan/cluster_file.h"
#include "lockstep/config/train_config.h"
#include "lockstep/plan/memory.h"
#include "lockstep/plan/step_time.h"

namespace lockstep::cli {

using Json = nlohmann::ordered_json;

struct Answer {
  config::TrainConfig config = {};
  int world = 1;
  plan::Layout layout = {};
  plan::StepTime time = {};
  int64_t memory = 0;  // bytes of the largest rank
  double mfu = 0, hfu = 0;

  double tokens_per_second() const { return static_cast<double>(layout.tokens()) / time.total(); }
};

// The configuration must be valid. Plans memory too.
Answer answer(const config::TrainConfig& config, const config::ModelSpec& model, int world,
              const plan::Cluster& cluster);

// {"layout": {...}, "step_ms", "tokens_per_s", "memory_bytes", "split": {...}, ...}
Json to_json(const Answer& answer, const plan::Cluster& cluster);
// "dp 16 x tp 2 x pp 1, shard optimizer, micro-batch 4"
std::string short_text(const Answer& answer);
std::string milliseconds_text(double seconds);

// Changes of the step time in parts where a number of the cluster were another.
struct Sensitivity {
  std::string change = {};
  double part = 0;
};
std::vector<Sensitivity> sensitivity(const Answer& answer, const config::ModelSpec& model,
                                     const plan::Cluster& cluster);

}  // namespace lockstep::cli
