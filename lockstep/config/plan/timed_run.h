// SPDX-License-Identifier: Apache-2.0
// Time and memory of a step, for a configuration and a built-in model. Private: not installed.
#pragma once

#include "lockstep/config/model/model_spec.h"
#include "lockstep/config/train_config.h"
#include "lockstep/plan/step_time.h"

namespace lockstep::config {

plan::ModelShape shape_of(const ModelSpec& model);
// The configuration must be valid for `world` ranks, the model without zeros (resolve_model).
plan::Layout timed_layout(const TrainConfig& config, const ModelSpec& model, int world);
// Whether MLP and head compute rows in tiles, of which `sharing` ranks have parts outside of
// attention.
bool computes_in_tiles(const TrainConfig& config, int sharing);
std::optional<int64_t> fp8_min_of(const TrainConfig& config);  // of the layout

// What is predicted of one layout.
struct Prediction {
  TrainConfig config = {};
  int world = 1;
  plan::Layout layout = {};
  plan::StepTime time = {};
  int64_t memory = 0;  // bytes of the rank that takes most
  size_t largest_rank = 0;

  double tokens_per_second() const { return static_cast<double>(layout.tokens()) / time.total(); }
};

Prediction predict(const TrainConfig& config, const ModelSpec& model, int world,
                   const plan::Cluster& cluster);

}  // namespace lockstep::config
