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
constexpr std::array<Name, 2> kGranularity = {"rows", "tensors"};

constexpr Requirement require_config("parallel_config");

// Numbers of chunks that would cut the layers into equal stages, two or more.
std::string dividing_chunks(int64_t layers, int pp) {
  std::vector<int64_t> found;
  for (int64_t chunks = 2; chunks * pp <= layers; ++chunks) {
    if (layers % (chunks * pp) == 0) found.push_back(chunks);
  }
  return found.empty() ? "none" : join(found);
}

}  // namespace

Name name_of(MemoryStrategy strategy) { return enum_name(kMemory, strategy); }
Name name_of(CommStrategy strategy) { return enum_name(kComm, strategy); }
Name name_of(PipelineSchedule schedule) { return enum_name(kSchedule, schedule); }
Name name_of(Recompute recompute) { return enum_name(kRecompute, recompute); }
Name name_of(ShardingStrategy strategy) { return enum_name(kSharding, strategy); }
Name name_of(ShardGranularity granularity) { return enum_name(kGranularity, granularity); }

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
  if (advanced.gradient_checkpointing) return *advanced.gradient_checkpointing;
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

int ParallelConfig::chunks() const {
  if (dims.pp == 1) return 1;
  if (advanced.chunks > 0) return advanced.chunks;
  switch (schedule) {
    case PipelineSchedule::interleaved:
    case PipelineSchedule::looped_bfs:
    case PipelineSchedule::zb_v:
    case PipelineSchedule::dualpipe_v:
      return 2;
    default:
      return 1;
  }
}

int ParallelConfig::microbatches() const {
  return global_batch_size == 0 ? 1 : global_batch_size / (micro_batch_size * dims.dp);
}

std::vector<int> ParallelConfig::layers_per_stage(int64_t layers) const {
  const int pp = dims.pp, each = chunks(), stages = pp * each;
  const std::vector<int>& split = advanced.layer_split;
  const std::string how =
      each == 1 ? format("pp {}", pp) : format("pp {} x {} chunks = {} stages", pp, each, stages);
  require_config(layers >= 1, format("{} layers, must be at least 1", layers));
  if (const auto counts = layout::layers_per_stage(layers, stages, split)) return *counts;
  require_config(
      !split.empty(),
      format("{} layers must be divisible by {}{}; or a layer split must say which stage has how "
             "many",
             layers, how,
             each == 1 ? ""
                       : format(" (chunks that divide them: {}; schedule 1f1b takes one)",
                                dividing_chunks(layers, pp))));
  const auto text = format("layer split ({})", join(split));
  require_config(
      static_cast<int>(split.size()) == stages,
      format("{} has {} entries, must have one for each of {}", text, split.size(), how));
  require_config(std::all_of(split.begin(), split.end(), [](int count) { return count >= 1; }),
                 text + ": every stage must have at least 1 layer");
  throw ConfigError(format("[parallel_config] {} sums to {}, must sum to {} layers", text,
                           std::accumulate(split.begin(), split.end(), int64_t{0}), layers));
}

void ParallelConfig::validate(int world_size) const {
  dims.validate(world_size);
  require_config(advanced.num_layers >= 0,
                 format("{} layers, must be at least 1, or 0 if unknown", advanced.num_layers));
  if (advanced.num_layers > 0) layers_per_stage(advanced.num_layers);
  require_config(micro_batch_size > 0,
                 format("micro-batch size {}, must be greater than 0", micro_batch_size));
  const int64_t rows = int64_t{micro_batch_size} * dims.dp;
  require_config(global_batch_size >= 0 && global_batch_size % rows == 0,
                 format("global batch size {}, must be a multiple of micro-batch size {} x dp {} = "
                        "{}, or 0: one micro-batch",
                        global_batch_size, micro_batch_size, dims.dp, rows));
  require_config(advanced.chunks == 0 || dims.pp > 1,
                 format("chunks is {}, but pp is 1: leave it out", advanced.chunks));
  require_config(advanced.chunks >= 0, format("chunks is {}, must be at least 1, or 0: as few as "
                                              "the schedule allows",
                                              advanced.chunks));
  require_config(!tensor_plan.empty() || dims.tp == 1,
                 format("tp is {}, but the tensor plan is empty: it must say which matrices the "
                        "ranks share",
                        dims.tp));
  require_config(
      !advanced.sequence_parallel || dims.tp > 1,
      format("sequence parallelism is on, but tp is {}: it must be at least 2", dims.tp));
  require_config(advanced.max_memory_per_device >= 0,
                 format("max memory per device {} bytes, must be greater than 0, or 0: no limit",
                        advanced.max_memory_per_device));
  require_config(advanced.communication_timeout.count() >= 0,
                 format("communication timeout {} ms, must be greater than 0, or 0: the group's",
                        advanced.communication_timeout.count()));
}

}  // namespace lockstep::layout
