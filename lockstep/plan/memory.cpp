// SPDX-License-Identifier: Apache-2.0
#include "lockstep/plan/memory.h"

#include <algorithm>
#include <utility>

#include "lockstep/layout/rank_map.h"
#include "lockstep/plan/activation_memory.h"
#include "lockstep/plan/offload_of_shards.h"
#include "lockstep/plan/run_description.h"
#include "lockstep/plan/state_memory.h"
#include "lockstep/schedule/schedule.h"

namespace lockstep::plan {
namespace {

using schedule::Op;

// cuBLAS takes it from torch's allocator; so much from Hopper on, a fourth of it before.
constexpr int64_t kCublasWorkspace = 32 << 20;

// Tensors on their way to the disk, or back, of the size of a layer's input.
constexpr int64_t kStoredUnderWay = 3;

// Which stages a rank of the pipeline has, and what it does with them.
struct PipelineRankWork {
  std::vector<Stage> chunks = {};
  std::vector<schedule::Action> actions = {};
  int64_t messages = 0;  // tensors that wait to be used, or to have been sent
};

std::vector<PipelineRankWork> work_per_pipeline_rank(const Run& run) {
  if (!run.pipeline) {
    // The second micro-batch finds gradients there; the others are like it.
    PipelineRankWork all{.chunks = stages_of(run)};
    for (int i = 0; i < std::min<int64_t>(2, run.micro_batches); ++i) {
      all.actions.push_back({Op::forward, i, 0});
      all.actions.push_back({Op::backward, i, 0});
    }
    return {all};
  }
  const auto schedule = schedule::generate(*run.pipeline);
  std::vector<PipelineRankWork> work_per_rank;
  for (auto& chunks : chunks_per_rank(run, schedule)) {
    work_per_rank.push_back({.chunks = std::move(chunks),
                             .actions = schedule.actions[work_per_rank.size()],
                             .messages = 2});
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

std::vector<Memory> memory_per_rank(const Run& run) {
  const layout::RankMap map(run.dims, run.order);
  const std::vector<PipelineRankWork> work_per_rank = work_per_pipeline_rank(run);
  int64_t stored = 0;
  for (const LayerKind& kind : run.model.kinds) stored = std::max(stored, kind.cost.stored);
  const int64_t workspace = run.cuda ? kCublasWorkspace : 0;
  const bool waits = run.micro_batches > 1 && !run.reproducible;

  std::vector<Memory> all(static_cast<size_t>(map.world_size()));
  std::vector<int64_t> peaks;
  for (int tp = 0; tp < run.dims.tp; ++tp) {
    for (size_t pp = 0; pp < work_per_rank.size(); ++pp) {
      const PipelineRankWork& work = work_per_rank[pp];
      std::vector<State> states(static_cast<size_t>(run.dims.dp));
      for (const Stage& stage : work.chunks) {
        const auto of_chunk = states_of(run, stage, tp);
        for (size_t dp = 0; dp < states.size(); ++dp) add(states[dp], of_chunk[dp]);
      }
      std::vector<std::vector<layout::OffloadPlan>> offloaded;
      if (run.offload.any()) offloaded = offload_of_shards(run, work.chunks, tp);
      if (tp == 0) {
        const bool keeps_gradients = states[0].made_in_backward > 0;
        peaks.push_back(peak_of_step(run.model, work.chunks, work.actions, keeps_gradients));
      }
      for (size_t dp = 0; dp < states.size(); ++dp) {
        const State& state = states[dp];
        const int rank =
            map.rank_at({.dp = static_cast<int>(dp), .tp = tp, .pp = static_cast<int>(pp)});
        Memory& memory = all[static_cast<size_t>(rank)];
        memory = {.parameters = state.parameters,
                  .gradients = state.gradients,
                  .optimizer = state.optimizer,
                  .activations = std::max<int64_t>(0, peaks[pp] - state.made_in_backward),
                  .buffers = state.buffers + work.messages * run.model.stream_bytes +
                             kStoredUnderWay * stored + workspace};
        if (!offloaded.empty()) offload(memory, offloaded[dp % offloaded.size()], waits);
      }
    }
  }
  return all;
}

}  // namespace lockstep::plan
