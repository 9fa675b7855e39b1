// SPDX-License-Identifier: Apache-2.0
#include "lockstep/plan/memory.h"

#include <algorithm>

#include "lockstep/config/pipeline.h"
#include "lockstep/layout/rank_map.h"
#include "lockstep/plan/offload_of_shares.h"
#include "lockstep/plan/steps.h"
#include "lockstep/schedule/schedule.h"

namespace lockstep::plan {
namespace {

using config::ModelSpec;
using config::TrainConfig;
using schedule::Op;

// cuBLAS takes it from torch's allocator; so much from Hopper on, a fourth of it before.
constexpr int64_t kCublasWorkspace = 32 << 20;

// Inputs of blocks on their way to the disk, or back.
constexpr int64_t kInputsUnderWay = 3;

// Which stages a rank of the pipeline has, and what it does with them.
struct PipelineRankWork {
  std::vector<Stage> chunks = {};
  std::vector<schedule::Action> actions = {};
  int64_t messages = 0;  // tensors that wait to be used, or to have been sent
};

std::vector<PipelineRankWork> work_per_pipeline_rank(const TrainConfig& config,
                                                     const ModelSpec& model, int world) {
  if (!config::is_pipelined(config.parallel)) {
    // The second micro-batch finds gradients there; the others are like it.
    PipelineRankWork all{.chunks = stages_of(config, model)};
    for (int i = 0; i < std::min(2, config.accumulation(world)); ++i) {
      all.actions.push_back({Op::forward, i, 0});
      all.actions.push_back({Op::backward, i, 0});
    }
    return {all};
  }
  const auto schedule = schedule::generate(config::schedule_options(config, world));
  const std::vector<Stage> stages = stages_of(config, model);
  std::vector<PipelineRankWork> work_per_rank;
  for (int rank = 0; rank < schedule.ranks; ++rank) {
    PipelineRankWork work{.actions = schedule.actions[static_cast<size_t>(rank)]};
    for (int chunk = 0; chunk < schedule.chunks; ++chunk)
      work.chunks.push_back(stages[static_cast<size_t>(schedule.stage(rank, chunk))]);
    work.messages = 2;
    work_per_rank.push_back(std::move(work));
  }
  return work_per_rank;
}

void add(State& sum, const State& state) {
  sum.parameters += state.parameters;
  sum.gradients += state.gradients;
  sum.optimizer += state.optimizer;
  sum.buffers += state.buffers;
  sum.made_in_backward += state.made_in_backward;
}

// What is on the device of an offloaded model, and what is not. `waits`: unreduced gradients of
// micro-batches wait for the last one.
void offload(Memory& memory, std::span<const layout::OffloadPlan> plans, bool waits) {
  memory.parameters = memory.gradients = memory.optimizer = 0;
  for (const layout::OffloadPlan& plan : plans) {
    memory.parameters += plan.resting.params;
    memory.gradients += plan.resting.grads;
    memory.optimizer += plan.resting.states;
    memory.buffers += plan.used.params + plan.used.states;
    memory.buffers += waits ? std::max(plan.used.grads, plan.unreduced_on_device) : plan.used.grads;
    memory.on_host += plan.on_host.sum() + plan.host_used + (waits ? plan.unreduced_on_host : 0);
    memory.on_disk += plan.on_disk;
  }
}

}  // namespace

std::vector<Memory> memory_per_rank(const TrainConfig& config, const ModelSpec& model, int world) {
  const layout::RankMap map(config.dims(world));
  const Sizes sizes = sizes_of(config, model);
  const std::vector<PipelineRankWork> work_per_rank = work_per_pipeline_rank(config, model, world);
  StepFacts facts{.embedding = profile_of(LayerKind::embedding, sizes),
                  .block = profile_of(LayerKind::block, sizes),
                  .head = profile_of(LayerKind::head, sizes)};
  if (model.is_tied()) facts.tied = sizes.vocab * sizes.hidden * sizes.element;

  const int64_t under_way = sizes.inputs_on_disk ? kInputsUnderWay : 0;
  const int64_t workspace = sizes.kernels.cuda ? kCublasWorkspace : 0;

  const bool waits = config.accumulation(world) > 1 && !config.train.reproducible;

  std::vector<Memory> all(static_cast<size_t>(world));
  std::vector<int64_t> peaks;
  for (int tp = 0; tp < config.parallel.tp; ++tp) {
    const LocalTensors tensors = local_tensors(model, config.parallel.tp, tp);
    for (size_t pp = 0; pp < work_per_rank.size(); ++pp) {
      const PipelineRankWork& work = work_per_rank[pp];
      std::vector<State> states(static_cast<size_t>(config.dp(world)));
      for (const Stage& stage : work.chunks) {
        const auto of_chunk = states_of(config, model, tensors, stage, world);
        for (size_t dp = 0; dp < states.size(); ++dp) add(states[dp], of_chunk[dp]);
      }
      std::vector<std::vector<layout::OffloadPlan>> offloaded;
      if (config.offload.any())
        offloaded = offload_of_shares(config, model, tensors, work.chunks, world);
      if (tp == 0) {
        facts.keeps_gradients = states[0].made_in_backward > 0;
        peaks.push_back(peak_of_step(work.chunks, work.actions, facts));
      }
      for (size_t dp = 0; dp < states.size(); ++dp) {
        const State& state = states[dp];
        const int rank =
            map.rank_at({.dp = static_cast<int>(dp), .tp = tp, .pp = static_cast<int>(pp)});
        Memory& memory = all[static_cast<size_t>(rank)];
        memory = {
            .parameters = state.parameters,
            .gradients = state.gradients,
            .optimizer = state.optimizer,
            .activations = std::max<int64_t>(0, peaks[pp] - state.made_in_backward),
            .buffers = state.buffers + (work.messages + under_way) * sizes.stream() + workspace};
        if (!offloaded.empty()) offload(memory, offloaded[dp % offloaded.size()], waits);
      }
    }
  }
  return all;
}

}  // namespace lockstep::plan
