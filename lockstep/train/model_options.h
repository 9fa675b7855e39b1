// SPDX-License-Identifier: Apache-2.0
// From a configuration to the options of what shares a model among ranks. Private: not installed.
#pragma once

#include <c10/core/TensorOptions.h>

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/config/train_config.h"
#include "lockstep/model/decoding.h"
#include "lockstep/model/layers.h"
#include "lockstep/nn/random/random_context.h"
#include "lockstep/parallel/pipeline/layer.h"
#include "lockstep/parallel/recompute/recompute.h"
#include "lockstep/parallel/shard/fully_shard.h"

namespace lockstep::train {

// The layers of the configured model, without gradients for what train.freeze names or, with
// `decoding`, for any parameter.
std::vector<parallel::Layer> model_layers(const config::TrainConfig& config, c10::Device device,
                                          const std::shared_ptr<nn::RandomContext>& random,
                                          const std::shared_ptr<model::Decoding>& decoding = {},
                                          const comm::Group& context = {},
                                          const std::shared_ptr<model::Tiling>& tiling = {});
at::TensorOptions tensor_options(const config::TrainConfig& config, c10::Device device);
parallel::MaterializeOptions initializer(const config::TrainConfig& config, c10::Device device);
parallel::FullyShardOptions shard_options(const config::TrainConfig& config);
// Null unless activations go to disk. `rank` is this one's, in the world.
std::shared_ptr<parallel::ActivationStore> activation_store(const config::TrainConfig& config,
                                                            int rank);
// Bytes that gathered parameters occupy in arenas.
int64_t arenas_of(std::span<const parallel::ShardedModel> models);
// "freeze 12 tensors with 1.2M of 4.8M parameters"; empty where all are trained.
std::string describe_frozen(const config::TrainConfig& config);
// "shard  full: 1.2M of 4.8M parameters on this rank, in 14 units"
std::string describe_shards(std::span<const parallel::ShardedModel> models);

// "offload 1.2 GB of parameters and optimizer state on the device ..."; empty where none is.
std::string describe_offload(std::span<const parallel::ShardedModel> models);

}  // namespace lockstep::train
