// SPDX-License-Identifier: Apache-2.0
#include "lockstep/cli/infer/loaded_model.h"

#include "lockstep/checkpoint/checkpoint.h"
#include "lockstep/comm/control/rank_consistency.h"
#include "lockstep/config/train_arguments.h"
#include "lockstep/train/device/device.h"
#include "lockstep/train/threads.h"

namespace lockstep::cli {

LoadedModel load_model(const ModelOptions& options, const ModelSource& source) {
  const config::TrainConfig& config = source.config;
  const comm::Group world = comm::init({.backend = config.comm.backend,
                                        .strategy = config.comm.strategy,
                                        .timeout = config.timeout()});
  comm::require_same(config::common_lines(config), world);
  config.validate(world.size());
  train::set_threads(config, world);
  const c10::Device device = train::choose_device(config, world);
  auto decoding = std::make_shared<model::Decoding>();
  train::TrainedModel model(config, device, world, decoding);
  if (source.manifest)
    checkpoint::load(options.path, model.slices(), world, {.may_ignore = {"optim."}});
  auto text = model::text_model(model.pipeline(), decoding, config.model);
  const bool splits =
      config.parallel.shard == layout::ShardingStrategy::no_shard && !config.offload.any();
  return {world, device, std::move(decoding), std::move(model), std::move(text), splits};
}

}  // namespace lockstep::cli
