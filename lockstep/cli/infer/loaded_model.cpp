// SPDX-License-Identifier: Apache-2.0
#include "lockstep/cli/infer/loaded_model.h"

#include "lockstep/checkpoint/checkpoint.h"
#include "lockstep/comm/control/rank_consistency.h"
#include "lockstep/config/train_arguments.h"
#include "lockstep/core/log.h"
#include "lockstep/memory/device_size.h"
#include "lockstep/train/device/device.h"
#include "lockstep/train/device/threads.h"

namespace lockstep::cli {
namespace {

// Bytes that a rank's parameters may take while they stay gathered. Half of the memory is for the
// cache and for activations. The limit of offload does not count these.
int64_t room_to_hold(const config::TrainConfig& config, c10::Device device,
                     const comm::Group& world) {
  if (config.offload.any()) return config.offload.device_limit;
  if (config.memory.max_per_device > 0) return config.memory.max_per_device / 2;
  return memory::device_bytes(device) / 2 / (device.is_cpu() ? world.local_size() : 1);
}

}  // namespace

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
  const bool whole =
      config.parallel.shard == layout::ShardingStrategy::no_shard && !config.offload.any();
  parallel::Pipeline pipeline = model.pipeline();
  const bool held = !whole && pipeline.hold(room_to_hold(config, device, world));
  if (!whole && world.rank() == 0)
    log::debug(held ? "parameters are held" : "parameters are streamed, unit by unit");
  // Stages copy tied parameters in every forward, on all data-parallel ranks together.
  const bool splits = whole || (held && config.parallel.pp == 1);
  constexpr std::chrono::hours kLongestText{24 * 7};
  return {world,
          device,
          std::move(decoding),
          std::move(model),
          std::move(text),
          splits,
          world.with_timeout(kLongestText)};
}

}  // namespace lockstep::cli
