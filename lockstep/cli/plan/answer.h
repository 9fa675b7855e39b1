// SPDX-License-Identifier: Apache-2.0
// What the planner says about one layout, for people and for programs.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "lockstep/config/plan/timed_run.h"
#include "lockstep/plan/cluster.h"

namespace lockstep::cli {

using Json = nlohmann::ordered_json;

// {"layout": {...}, "step_ms", "tokens_per_s", "memory_bytes", "split": {...}, ...}
Json to_json(const config::Prediction& found, const config::ModelSpec& model,
             const plan::Cluster& cluster);
// "dp 16 x tp 2 x pp 1, shard optimizer, micro-batch 4"
std::string short_text(const config::Prediction& found);
// "412 ms"
std::string seconds_text(double seconds);

// The parts of a step with their names, in the order in which they are printed.
struct Part {
  const char* name;
  double seconds;
};
std::vector<Part> parts_of(const plan::StepTime& time);

// Change of the step time, in parts, where a number of the cluster were another.
struct Sensitivity {
  std::string change = {};
  double part = 0;
};
std::vector<Sensitivity> sensitivity(const config::Prediction& found,
                                     const config::ModelSpec& model, const plan::Cluster& cluster);

}  // namespace lockstep::cli
