// SPDX-License-Identifier: Apache-2.0
// Which products of a model are computed in 8-bit floats. Private: not installed.
#pragma once

#include <set>
#include <string>

#include "lockstep/config/model/model_spec.h"
#include "lockstep/config/train_config.h"

namespace lockstep::config {

// The linear maps in each block that train.precision fp8 computes in 8 bits, such as
// "attention.qkv"; none with other precisions. ConfigError where train.precision and train.dtype
// differ, where no product is large enough for train.fp8_min, and where the sizes of one that is
// wanted, or of a tensor-parallel rank's part of it, are no multiples of 16.
std::set<std::string> float8_layers(const TrainConfig& config, const ModelSpec& model);

}  // namespace lockstep::config
