// SPDX-License-Identifier: Apache-2.0
#include "lockstep/config/offload_rules.h"

#include <string>
#include <string_view>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/require.h"

namespace lockstep::config {
namespace {

// With all switches off: a key that says something would be overlooked.
void require_nothing_set(const TrainConfig& config) {
  TrainConfig copy = config, defaults;
  const Schema now = train_schema(copy), before = train_schema(defaults);
  for (size_t i = 0; i < now.sections().size(); ++i) {
    const Section& section = now.sections()[i];
    if (section.name != "offload") continue;
    for (size_t k = 0; k < section.options.size(); ++k) {
      require(section.options[k].get() == before.sections()[i].options[k].get(),
              format("{} is set, but nothing is offloaded: set offload.params, offload.grads or "
                     "offload.optimizer",
                     section.options[k].name));
    }
  }
}

// Keys that are only about one of the switches.
void require_switch(bool is_set, const char* key, bool on, const char* needed, const char* why) {
  require(!is_set || on,
          format("offload.{} is set, but offload.{} is false: {}", key, needed, why));
}

void validate_update(const TrainConfig& config) {
  const layout::OffloadOptions& offload = config.offload;
  const bool in_backward = offload.advanced.clip_mode == layout::ClipMode::none;
  require(!in_backward || offload.optimizer,
          "offload.clip_mode is none, but offload.optimizer is false: it is for offloaded state");
  require(!in_backward || config.optim.clip == 0,
          format("offload.clip_mode none updates parameters before the norm of all gradients is "
                 "known: set optim.clip 0; it is {}",
                 config.optim.clip));
  require(
      !in_backward || (config.parallel.tp == 1 && config.parallel.pp == 1),
      format("offload.clip_mode is none with parallel.tp {} and parallel.pp {}, which must be 1: "
             "their ranks add to gradients after backward",
             config.parallel.tp, config.parallel.pp));
}

}  // namespace

void validate_offload(const TrainConfig& config) {
  const layout::OffloadOptions& offload = config.offload;
  if (!offload.any()) return require_nothing_set(config);
  layout::validate(layout::resolved(config.offload_options(), 0, 0));
  require_switch(offload.param_budget != 0, "param_budget", offload.params, "params",
                 "parameters stay on the device");
  const bool sets_site = offload.advanced.update_site != layout::UpdateSite::automatic;
  const char* no_state = "optimizer state stays on the device";
  require_switch(sets_site, "update_site", offload.optimizer, "optimizer", no_state);
  require_switch(offload.codec.has_moments(), "codec", offload.optimizer, "optimizer", no_state);
  require_switch(!offload.disk.empty(), "disk", offload.optimizer, "optimizer",
                 "only optimizer state goes to the disk");
  require(config.optim.moments == Precision::float32,
          format("optim.moments is bfloat16, must be float32 where something is offloaded "
                 "(offload.params {}, offload.grads {}, offload.optimizer {}); offload.optimizer "
                 "true with offload.codec bf16 keeps moments in 2 bytes",
                 offload.params, offload.grads, offload.optimizer));
  validate_update(config);
  const layout::ShardingStrategy shard = config.parallel.shard;
  require(shard == layout::ShardingStrategy::no_shard ||
              shard == layout::ShardingStrategy::full_shard ||
              shard == layout::ShardingStrategy::hybrid_shard,
          format("parallel.shard is {}, must be one of none, full, hybrid where something is "
                 "offloaded: the others keep gathered parameters on the device",
                 name_of(shard)));
}

}  // namespace lockstep::config
