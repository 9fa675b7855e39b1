// SPDX-License-Identifier: Apache-2.0
// Tensor parallelism of the models that a specification describes.
#pragma once

#include "lockstep/config/model/model_spec.h"
#include "lockstep/config/train_config.h"
#include "lockstep/layout/tensor_plan.h"

namespace lockstep::config {

// How tensor-parallel ranks share the model. Names every module that has parameters or draws.
layout::TensorPlan tensor_plan(const ModelSpec& model);

// What a rank of `tp` holds of a tensor of the model.
layout::TensorSplit tensor_split(const ModelSpec& model, const TensorSpec& tensor, int tp,
                                 int rank);

// Throws ConfigError for sizes of the model that parallel.tp does not divide, or that
// train.precision fp8 cannot compute.
void validate_tensor(const TrainConfig& config, const ModelSpec& model);

}  // namespace lockstep::config
