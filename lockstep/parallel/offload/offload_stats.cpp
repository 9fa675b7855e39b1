// SPDX-License-Identifier: Apache-2.0
#include "lockstep/optim/kernels/packed_update.h"
#include "lockstep/parallel/offload/decide_again.h"
#include "lockstep/parallel/offload/offload.h"
#include "lockstep/parallel/shard/sharded_model_state.h"
#include "lockstep/parallel/tiers/offload_tiers.h"

namespace lockstep::parallel {

using detail::OffloadTiers;
using layout::Tier;

OffloadStats::Kept detail::kept_params(const ShardEngine& engine) {
  OffloadStats::Kept kept;
  for (const auto& flat : engine.flats()) {
    if (flat->plan().offload->params == Tier::device) continue;
    const EncodedShard* const encoded = flat->shard.encoded();
    const size_t bytes = flat->shard.bytes();
    kept.bytes += static_cast<int64_t>(bytes);
    kept.plain += static_cast<int64_t>(encoded != nullptr ? encoded->plain_bytes() : bytes);
  }
  return kept;
}

OffloadStats::Kept detail::kept_grads(const ShardEngine& engine) {
  OffloadStats::Kept kept;
  for (const auto& flat : engine.flats()) {
    const FlatOffload& offload = *flat->plan().offload;
    if (offload.grads == Tier::device || !flat->plan().trained ||
        offload.tiers->updates_in_backward()) {
      continue;
    }
    const auto plain = static_cast<int64_t>(static_cast<size_t>(flat->shard.values().numel()) *
                                            c10::elementSize(flat->plan().gradient_dtype));
    if (offload.grad_codec == codec::Codec::lossless) {
      const PackedGradient* const packed = flat->offloaded->packed();
      if (packed == nullptr || packed->bytes() == 0) continue;  // no backward yet
      kept.bytes += static_cast<int64_t>(packed->bytes());
      kept.plain += plain;
    } else {
      kept.bytes += plain;
      kept.plain += offload.grad_codec == codec::Codec::bf16 ? 2 * plain : plain;
    }
  }
  return kept;
}

OffloadStats offload_stats(const ShardedModel& model) {
  OffloadStats stats;
  const auto& engine = model.shared()->engine;
  if (!engine || !engine->tiers()) return stats;
  const OffloadTiers& tiers = *engine->tiers();
  const auto bytes = [](size_t count) { return static_cast<int64_t>(count); };
  stats.to_device = tiers.traffic.to_device;
  stats.to_host = tiers.traffic.to_host;
  stats.from_disk = tiers.traffic.from_disk;
  stats.to_disk = tiers.traffic.to_disk;
  stats.device_bytes = bytes(tiers.device_budget.used());
  stats.device_peak = bytes(tiers.device_budget.peak());
  stats.device_limit = bytes(tiers.device_budget.limit());
  stats.param_bytes = bytes(tiers.param_budget.used());
  stats.param_peak = bytes(tiers.param_budget.peak());
  stats.param_budget = bytes(tiers.param_budget.limit());
  stats.host_bytes = bytes(tiers.host_budget.used());
  stats.host_peak = bytes(tiers.host_budget.peak());
  stats.host_budget = bytes(tiers.host_budget.limit());
  if (tiers.device.is_cpu()) stats.device_resident = bytes(tiers.device_memory.resident());
  for (const auto& flat : engine->flats()) {
    const detail::FlatOffload& offload = *flat->plan().offload;
    (offload.params == Tier::device ? stats.params_on_device : stats.params_on_host) +=
        bytes(flat->shard.bytes());
    for (const detail::StatePlan& state : offload.states) {
      for (const detail::StateSlice& slice : state.slices) {
        int64_t& sum = slice.tier == Tier::device ? stats.state_on_device
                       : slice.tier == Tier::host ? stats.state_on_host
                                                  : stats.state_on_disk;
        sum += bytes(optim::packed_layout(state.format, slice.count).total);
      }
    }
  }
  stats.state_on_host += tiers.kept.moved_to_host;
  stats.state_on_disk -= tiers.kept.moved_to_host;
  stats.params_kept = detail::kept_params(*engine);
  stats.grads_kept = detail::kept_grads(*engine);
  stats.state_kept = {.bytes = tiers.kept.bytes, .plain = tiers.kept.plain};
  stats.site = tiers.site;
  stats.activation_peak = tiers.activation_peak;
  stats.decisions = tiers.decisions;
  return stats;
}

}  // namespace lockstep::parallel
