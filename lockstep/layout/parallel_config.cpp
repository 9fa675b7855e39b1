// SPDX-License-Identifier: Apache-2.0
#include "lockstep/layout/parallel_config.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <string>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/require.h"
#include "lockstep/layout/enum_names.h"

namespace lockstep::layout {
namespace {

using Name = std::string_view;
constexpr std::array<Name, 4> kMemory = {"basic", "standard", "aggressive", "extreme"};
constexpr std::array<Name, 5> kComm = {"all-reduce", "hierarchical", "ring", "tree", "adaptive"};
constexpr std::array<Name, 12> kSchedule = {"round-robin", "sequential", "gpipe",      "1f1b",
                                            "interleaved", "looped-bfs", "zb-h1",      "zb-h2",
                                            "zb-1p",       "zb-v",       "dualpipe-v", "file"};
constexpr std::array<Name, 3> kRecompute = {"none", "selective", "full"};
constexpr std::array<Name, 5> kSharding = {"none", "full", "grad_op", "optimizer", "hybrid"};

constexpr Requirement require_config("parallel_config");

void validate_layers(const ParallelConfig& config) {
  const auto& split = config.layer_split;
  const int pp = config.dims.pp;
  require_config(config.num_layers >= 1,
                 format("{} layers, must be at least 1", config.num_layers));
  if (layers_per_stage(config.num_layers, pp, split)) return;
  require_config(!split.empty(),
                 format("{} layers must be divisible by pp {}, or a layer split must say which "
                        "stage has how many",
                        config.num_layers, pp));
  const auto text = format("layer split ({})", join(split));
  require_config(
      static_cast<int>(split.size()) == pp,
      format("{} has {} entries, must have one for each of pp {}", text, split.size(), pp));
  require_config(std::all_of(split.begin(), split.end(), [](int layers) { return layers >= 1; }),
                 text + ": every stage must have at least 1 layer");
  throw ConfigError(format("[parallel_config] {} sums to {}, must sum to {} layers", text,
                           std::accumulate(split.begin(), split.end(), int64_t{0}),
                           config.num_layers));
}

}  // namespace

Name name_of(MemoryStrategy strategy) { return enum_name(kMemory, strategy); }
Name name_of(CommStrategy strategy) { return enum_name(kComm, strategy); }
Name name_of(PipelineSchedule schedule) { return enum_name(kSchedule, schedule); }
Name name_of(Recompute recompute) { return enum_name(kRecompute, recompute); }
Name name_of(ShardingStrategy strategy) { return enum_name(kSharding, strategy); }

MemoryStrategy parse_memory_strategy(Name name) {
  return parse_enum<MemoryStrategy>("memory strategy", kMemory, name);
}
CommStrategy parse_comm_strategy(Name name) {
  return parse_enum<CommStrategy>("communication strategy", kComm, name);
}
PipelineSchedule parse_pipeline_schedule(Name name) {
  return parse_enum<PipelineSchedule>("pipeline schedule", kSchedule, name);
}
Recompute parse_recompute(Name name) {
  return parse_enum<Recompute>("recompute", kRecompute, name);
}
ShardingStrategy parse_sharding_strategy(Name name) {
  return parse_enum<ShardingStrategy>("sharding strategy", kSharding, name);
}

Recompute ParallelConfig::recompute() const {
  if (gradient_checkpointing) return *gradient_checkpointing ? Recompute::full : Recompute::none;
  switch (memory) {
    case MemoryStrategy::basic:
      return Recompute::none;
    case MemoryStrategy::standard:
      return Recompute::selective;
    default:
      return Recompute::full;
  }
}

std::optional<std::vector<int>> layers_per_stage(int64_t layers, int64_t stages,
                                                 const std::vector<int>& split) {
  if (split.empty()) {
    if (layers < stages || layers % stages != 0) return std::nullopt;
    return std::vector<int>(static_cast<size_t>(stages), static_cast<int>(layers / stages));
  }
  const bool fits = static_cast<int64_t>(split.size()) == stages &&
                    *std::min_element(split.begin(), split.end()) >= 1 &&
                    std::accumulate(split.begin(), split.end(), int64_t{0}) == layers;
  return fits ? std::optional(split) : std::nullopt;
}

std::vector<int> ParallelConfig::layers_per_stage() const {
  return layout::layers_per_stage(num_layers, dims.pp, layer_split).value();
}

void ParallelConfig::validate(int world_size) const {
  dims.validate(world_size);
  validate_layers(*this);
  require_config(micro_batch_size > 0,
                 format("micro-batch size {}, must be greater than 0", micro_batch_size));
  require_config(
      max_memory_per_device > 0,
      format("max memory per device {} bytes, must be greater than 0", max_memory_per_device));
  require_config(
      communication_timeout.count() > 0,
      format("communication timeout {} ms, must be greater than 0", communication_timeout.count()));
}

}  // namespace lockstep::layout
