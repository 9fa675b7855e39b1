// SPDX-License-Identifier: Apache-2.0
// What each type of layer takes in each part of a step, in bytes. Private: not installed.
#pragma once

#include "lockstep/config/model/module_tapes.h"
#include "lockstep/plan/run_description.h"

namespace lockstep::config {

enum class LayerType { embedding, block, head };

plan::LayerCost layer_cost(LayerType type, const LayerSizes& sizes);

}  // namespace lockstep::config
