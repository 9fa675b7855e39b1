// SPDX-License-Identifier: Apache-2.0
// What plan::memory_per_rank says against what ranks take: each layout trains a few steps, in
// processes, because memory is counted by process.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/config/plan/planned_run.h"
#include "lockstep/core/rank_env.h"
#include "lockstep/core/system_memory.h"
#include "lockstep/memory/meter.h"
#include "lockstep/nn/kernels/can_multiply.h"
#include "lockstep/optim/adamw.h"
#include "lockstep/optim/parameters/parameters.h"
#include "lockstep/parallel/offload/offload.h"
#include "lockstep/plan/memory.h"
#include "lockstep/train/trained_model.h"
#include "tests/support/sampling.h"

namespace lockstep::train {
namespace {

using config::ModelKind;
using config::TrainConfig;
using layout::MemoryStrategy;
using layout::PipelineSchedule;
using layout::Recompute;
using layout::ShardingStrategy;

const comm::Group& world() {
  static const comm::Group group = [] {
    memory::Meter::install();
    return comm::init();
  }();
  return group;
}

struct Layout {
  const char* name;
  int ranks;
  std::function<void(TrainConfig&)> set;
};

void PrintTo(const Layout& layout, std::ostream* out) { *out << layout.name; }

// Small blocks and long rows, so that activations are a large part.
TrainConfig base() {
  TrainConfig config;
  config.data.path = "any";
  config.model.layers = 4;
  config.model.hidden = 128;
  config.model.heads = 4;
  config.model.vocab = 512;
  config.train.seq_len = 192;
  config.train.micro_batch = 2;
  config.train.device = config::DeviceKind::cpu;
  return config;
}

void llama(TrainConfig& config) {
  config.model.kind = ModelKind::llama;
  config.model.kv_heads = 2;
}

void qwen3(TrainConfig& config) {
  llama(config);
  config.model.qk_norm = true;
  config.model.head_dim = 48;
}

// With sequence parallelism.
void tensor(TrainConfig& config) {
  config.parallel.tp = 2;
  config.parallel.sequence_parallel = true;
}

void context(TrainConfig& config, config::ContextKind kind) {
  config.parallel.cp = 2;
  config.parallel.context = kind;
  config.train.seq_len = 384;
}

void tiles(TrainConfig& config) {
  config.train.seq_len = 512;
  config.train.tile = 64;
}

void pipeline(TrainConfig& config, PipelineSchedule schedule, int chunks = 1) {
  config.parallel.pp = 2;
  config.parallel.schedule = schedule;
  config.parallel.chunks = chunks;
  config.train.global_batch = 8;  // four micro-batches
}

// Larger blocks, because memory is taken in whole pages. The site is given: what would be measured
// is not part of a step.
void offload(TrainConfig& config) {
  config.model.hidden = 256;
  config.train.seq_len = 64;
  config.offload = {.device_limit = 96 << 20,
                    .advanced = {.strategy = layout::OffloadStrategy::extreme,
                                 .update_site = layout::UpdateSite::cpu}};
}

const std::vector<Layout>& layouts() {
  static const std::vector<Layout> all{
      {"gpt", 1, [](auto&) {}},
      {"gpt_untied", 1, [](auto& c) { c.model.tied = false; }},
      {"gpt_large_vocabulary", 1, [](auto& c) { c.model.vocab = 8192; }},
      {"gpt_one_row", 1,
       [](auto& c) {
         c.train.micro_batch = 1;
         c.train.seq_len = 256;
       }},
      {"gpt_dropout", 1, [](auto& c) { c.model.dropout = 0.1; }},
      {"gpt_micro_batches", 1, [](auto& c) { c.train.global_batch = 8; }},
      {"gpt_selective", 1, [](auto& c) { c.train.recompute = Recompute::selective; }},
      {"gpt_fit", 1,
       [](auto& c) {
         c.train.fit = config::RecomputedBlocks{1, 1};
       }},
      {"gpt_full", 1, [](auto& c) { c.train.recompute = Recompute::full; }},
      {"gpt_reproducible", 1,
       [](auto& c) {
         c.train.reproducible = true;
         c.train.global_batch = 8;
       }},
      {"llama", 1, [](auto& c) { llama(c); }},
      {"llama_selective", 1,
       [](auto& c) {
         llama(c);
         c.train.recompute = Recompute::selective;
       }},
      {"llama_full", 1,
       [](auto& c) {
         llama(c);
         c.train.recompute = Recompute::full;
       }},
      {"qwen2_window", 1,
       [](auto& c) {
         llama(c);
         c.model.qkv_bias = true;
         c.model.window = 50;
       }},
      {"qwen3", 1, [](auto& c) { qwen3(c); }},
      {"qwen3_selective", 1,
       [](auto& c) {
         qwen3(c);
         c.train.recompute = Recompute::selective;
       }},
      {"gpt_tiles", 1, [](auto& c) { tiles(c); }},
      {"llama_tiles_full", 1,
       [](auto& c) {
         llama(c);
         tiles(c);
         c.train.recompute = Recompute::full;
       }},
      {"ddp", 2, [](auto&) {}},
      {"ddp_micro_batches", 2, [](auto& c) { c.train.global_batch = 16; }},
      {"shard_full", 2, [](auto& c) { c.parallel.shard = ShardingStrategy::full_shard; }},
      {"shard_full_micro_batches", 2,
       [](auto& c) {
         c.parallel.shard = ShardingStrategy::full_shard;
         c.train.global_batch = 16;
       }},
      {"shard_grad_op_llama", 2,
       [](auto& c) {
         llama(c);
         c.parallel.shard = ShardingStrategy::shard_grad_op;
       }},
      {"shard_optimizer", 2, [](auto& c) { c.parallel.shard = ShardingStrategy::optimizer; }},
      // One tensor more than there are pairs, and far larger than the others.
      {"shard_optimizer_tensors", 2,
       [](auto& c) {
         c.parallel.shard = ShardingStrategy::optimizer;
         c.parallel.shard_granularity = layout::ShardGranularity::tensors;
         c.model.vocab = 4096;
       }},
      {"gpipe", 2, [](auto& c) { pipeline(c, PipelineSchedule::gpipe); }},
      {"1f1b", 2, [](auto& c) { pipeline(c, PipelineSchedule::one_f_one_b); }},
      {"1f1b_llama_full", 2,
       [](auto& c) {
         llama(c);
         pipeline(c, PipelineSchedule::one_f_one_b);
         c.train.recompute = Recompute::full;
       }},
      {"interleaved", 2, [](auto& c) { pipeline(c, PipelineSchedule::interleaved, 2); }},
      {"zb_h1", 2, [](auto& c) { pipeline(c, PipelineSchedule::zb_h1); }},
      {"zb_v", 2, [](auto& c) { pipeline(c, PipelineSchedule::zb_v, 2); }},
      {"zb_h1_llama_selective", 2,
       [](auto& c) {
         llama(c);
         pipeline(c, PipelineSchedule::zb_h1);
         c.train.recompute = Recompute::selective;
       }},
      {"tp", 2, [](auto& c) { c.parallel.tp = 2; }},
      {"tp_large_vocabulary", 2,
       [](auto& c) {
         c.parallel.tp = 2;
         c.model.vocab = 8192;
       }},
      {"tp_llama", 2,
       [](auto& c) {
         llama(c);
         c.parallel.tp = 2;
       }},
      {"tp_sequence", 2, [](auto& c) { tensor(c); }},
      {"tp_sequence_llama", 2,
       [](auto& c) {
         llama(c);
         tensor(c);
       }},
      {"tp_sequence_selective", 2,
       [](auto& c) {
         tensor(c);
         c.train.recompute = Recompute::selective;
       }},
      {"tp_llama_full", 2,
       [](auto& c) {
         llama(c);
         c.parallel.tp = 2;
         c.train.recompute = Recompute::full;
       }},
      {"extreme", 1, [](auto& c) { c.memory.strategy = MemoryStrategy::extreme; }},
      {"extreme_selective", 1,
       [](auto& c) {
         c.memory.strategy = MemoryStrategy::extreme;
         c.train.recompute = Recompute::selective;
       }},
      {"extreme_none", 1,
       [](auto& c) {
         c.memory.strategy = MemoryStrategy::extreme;
         c.train.recompute = Recompute::none;
       }},
      {"extreme_pipeline", 2,
       [](auto& c) {
         pipeline(c, PipelineSchedule::one_f_one_b);
         c.memory.strategy = MemoryStrategy::extreme;
       }},
      {"offload", 1, [](auto& c) { offload(c); }},
      {"offload_params", 1,
       [](auto& c) {
         offload(c);
         c.offload.grads = c.offload.optimizer = false;
         c.offload.advanced.update_site = layout::UpdateSite::automatic;  // where the state is
       }},
      {"offload_grads", 1,
       [](auto& c) {
         offload(c);
         c.offload.params = c.offload.optimizer = false;
         c.offload.advanced.update_site = layout::UpdateSite::automatic;
       }},
      {"offload_optimizer_cpu", 1,
       [](auto& c) {
         offload(c);
         c.offload.params = c.offload.grads = false;
       }},
      {"offload_optimizer_device", 1,
       [](auto& c) {
         offload(c);
         c.offload.params = c.offload.grads = false;
         c.offload.advanced.update_site = layout::UpdateSite::device;
       }},
      {"offload_balanced_codec", 1,
       [](auto& c) {
         offload(c);
         if (nn::can_multiply(at::kBFloat16, at::kCPU)) c.train.dtype = config::Precision::bfloat16;
         c.offload.device_limit = 48 << 20;
         c.offload.advanced.strategy = layout::OffloadStrategy::balanced;
         c.offload.codec = {codec::Codec::quantization, codec::Codec::quantization};
       }},
      {"offload_micro_batches", 1,
       [](auto& c) {
         offload(c);
         c.train.global_batch = 8;
       }},
      {"offload_shards", 2,
       [](auto& c) {
         offload(c);
         c.parallel.shard = ShardingStrategy::full_shard;
       }},
      {"offload_shards_optimizer", 2,
       [](auto& c) {
         offload(c);
         c.offload.params = c.offload.grads = false;
         c.parallel.shard = ShardingStrategy::full_shard;
       }},
      {"offload_interleaved", 2,
       [](auto& c) {
         offload(c);
         pipeline(c, PipelineSchedule::interleaved, 2);
       }},
      {"context_gather", 2, [](auto& c) { context(c, config::ContextKind::gather); }},
      {"context_ring_llama", 2,
       [](auto& c) {
         llama(c);
         context(c, config::ContextKind::ring);
       }},
      {"tp_pipeline", 4,
       [](auto& c) {
         tensor(c);
         pipeline(c, PipelineSchedule::one_f_one_b);
       }},
      {"tp_shards", 4,
       [](auto& c) {
         tensor(c);
         c.parallel.shard = ShardingStrategy::full_shard;
         c.train.global_batch = 16;
       }},
      {"shard_hybrid", 4,
       [](auto& c) {
         c.parallel.shard = ShardingStrategy::hybrid_shard;
         c.parallel.shard_size = 2;
       }},
      {"pipeline_of_shards", 4,
       [](auto& c) {
         pipeline(c, PipelineSchedule::one_f_one_b);
         c.parallel.shard = ShardingStrategy::full_shard;
         c.train.global_batch = 16;
       }},
      {"pipeline_of_whole_tensors", 4,
       [](auto& c) {
         pipeline(c, PipelineSchedule::interleaved, 2);
         c.parallel.shard = ShardingStrategy::optimizer;
         c.parallel.shard_granularity = layout::ShardGranularity::tensors;
         c.train.global_batch = 16;
       }},
      {"pipeline_of_ddp", 4,
       [](auto& c) {
         pipeline(c, PipelineSchedule::one_f_one_b);
         c.train.global_batch = 16;
       }},
  };
  return all;
}

std::vector<Layout> of_this_world() {
  std::vector<Layout> mine;
  const int ranks = RankEnv::detect().world_size;
  for (const Layout& layout : layouts()) {
    if (layout.ranks == ranks) mine.push_back(layout);
  }
  if (test::tests_all()) return mine;
  std::vector<Layout> some;
  for (size_t i = 0; i < mine.size(); i += 3) some.push_back(mine[i]);
  return some;
}

struct Measured {
  int64_t total = 0;    // on the device
  int64_t on_host = 0;  // of what is offloaded
  int64_t device_limit = 0, host_budget = 0;
};

// Budgets count what is offloaded, symmetric memory too.
Measured offloaded(const TrainedModel& model) {
  Measured sum;
  for (const parallel::ShardedModel& stage : model.sharded()) {
    const parallel::OffloadStats stats = parallel::offload_stats(stage);
    sum.total += stats.device_peak;
    sum.on_host += stats.host_peak;
    sum.device_limit += stats.device_limit;
    sum.host_budget += stats.host_budget;
  }
  return sum;
}

int64_t held_outside_torch(const TrainedModel& model, bool offloads) {
  return (offloads ? 0 : static_cast<int64_t>(symmetric_memory())) + model.arena_bytes();
}

std::unique_ptr<optim::Optimizer> optimizer_of(const TrainedModel& model, bool offloads) {
  auto groups = optim::decay_groups(model.parameters(), 0.1);
  if (offloads)
    return std::make_unique<parallel::OffloadedAdamW>(model.sharded(), std::move(groups));
  return std::make_unique<optim::AdamW>(std::move(groups));
}

// The highest peak of three steps after the first two, without what was there before there was a
// model: how much of what is on its way a rank holds at once depends on how far ahead it is.
Measured measure(const TrainConfig& config) {
  const bool offloads = config.offload.any();
  // Threads of the last model may still have some of its memory: least is what none of them had.
  static int64_t least = memory::Meter::current();
  static auto least_symmetric = static_cast<int64_t>(symmetric_memory());
  least = std::min(least, memory::Meter::current());
  least_symmetric = std::min(least_symmetric, static_cast<int64_t>(symmetric_memory()));
  const int64_t before = least + (offloads ? 0 : least_symmetric);
  TrainedModel model(config, at::kCPU, world());
  const auto optimizer = optimizer_of(model, offloads);
  const int64_t rows = config.train.micro_batch, length = config.train.seq_len;
  const auto next = [&] {
    const at::Tensor tokens = at::randint(config.model.vocab, {rows, length + 1}, at::kLong);
    const auto values = [](const at::Tensor& some) {
      const at::Tensor all = some.contiguous();
      return std::vector<int64_t>(all.data_ptr<int64_t>(), all.data_ptr<int64_t>() + all.numel());
    };
    return to_tensors({.input = values(tokens.narrow(1, 0, length)),
                       .target = values(tokens.narrow(1, 1, length)),
                       .rows = rows},
                      length, at::kCPU, model.context());
  };
  int64_t peak = 0;
  for (int step = 0; step < 5; ++step) {
    memory::Meter::reset_peak();
    model.step({.next = next, .step = step, .loss_scale = 1e-3});
    model.clip_grad_norm_(1);
    optimizer->step();
    optimizer->zero_grad();
    if (step < 2) continue;
    peak = std::max(peak, memory::Meter::peak() + held_outside_torch(model, offloads));
  }
  Measured measured = offloaded(model);
  measured.total += peak - before;
  return measured;
}

class MemoryPrediction : public testing::TestWithParam<Layout> {};

// Ranks with rows of their own against ranks that share them: of all that is not state, counted.
TEST(MemoryPredictionOfContext, ActivationsAreThoseOfTheTokensOfARank) {
  if (world().size() != 2) return;
  const auto activations = [](int cp) {
    TrainConfig config = base();
    config.model.kind = ModelKind::llama;
    config.train.seq_len = 512;
    config.parallel.cp = cp;
    if (cp > 1) config.parallel.context = config::ContextKind::ring;
    config.model = config.model.resolved(config.train.seq_len, config.model.vocab);
    config.validate(world().size());
    const plan::Memory memory =
        plan::memory_per_rank(config::planned_run(config, config.model, world().size()))[0];
    const int64_t state = memory.total() - memory.activations;
    return static_cast<double>(measure(config).total - state);
  };
  EXPECT_NEAR(activations(1) / activations(2), 2, 0.25);
}

TEST_P(MemoryPrediction, IsWithinTenPercent) {
  TrainConfig config = base();
  GetParam().set(config);
  config.model = config.model.resolved(config.train.seq_len, config.model.vocab);
  config.validate(world().size());
  const plan::Memory predicted = plan::memory_per_rank(config::planned_run(
      config, config.model, world().size()))[static_cast<size_t>(world().rank())];
  const Measured measured = measure(config);
  const auto megabytes = [](int64_t bytes) { return static_cast<double>(bytes) / (1 << 20); };
  const auto compare = [&](int64_t said, int64_t found) {
    EXPECT_NEAR(megabytes(said), megabytes(found), 0.1 * megabytes(found));
    return found == 0 ? 0 : 100 * (megabytes(said) / megabytes(found) - 1);
  };
  std::printf("%-26s rank %d: %6.2f %6.2f %6.2f %6.2f %6.2f = %6.2f MB, measured %6.2f, %+.1f %%\n",
              GetParam().name, world().rank(), megabytes(predicted.parameters),
              megabytes(predicted.gradients), megabytes(predicted.optimizer),
              megabytes(predicted.activations), megabytes(predicted.buffers),
              megabytes(predicted.total()), megabytes(measured.total),
              compare(predicted.total(), measured.total));
  if (!config.offload.any()) return;
  std::printf("%-26s rank %d: on the host %6.2f MB, measured %6.2f, %+.1f %%\n", GetParam().name,
              world().rank(), megabytes(predicted.on_host), megabytes(measured.on_host),
              compare(predicted.on_host, measured.on_host));
  // All stages of a rank together have its budgets, those that were left open too.
  const auto allowed = layout::resolved(config.offload, 0, 0);
  EXPECT_LE(measured.device_limit, allowed.device_limit);
  EXPECT_LE(measured.host_budget, allowed.host_budget);
}

// What backward does not need for frozen parameters is not known, and counts.
TEST(FrozenMemoryPrediction, IsAnUpperBound) {
  TrainConfig config = base();
  if (world().size() > 1) config.parallel.shard = ShardingStrategy::full_shard;
  config.model = config.model.resolved(config.train.seq_len, config.model.vocab);
  const auto total = [&] {
    return plan::memory_per_rank(config::planned_run(
        config, config.model, world().size()))[static_cast<size_t>(world().rank())]
        .total();
  };
  const int64_t all = total();
  config.train.freeze = "blocks.2.*,blocks.3.*,embed.*";
  const int64_t predicted = total(), measured = measure(config).total;
  std::printf("frozen rank %d: %.2f MB, measured %.2f\n", world().rank(),
              static_cast<double>(predicted) / (1 << 20),
              static_cast<double>(measured) / (1 << 20));
  EXPECT_LT(predicted, all);
  EXPECT_GT(1.02 * static_cast<double>(predicted), static_cast<double>(measured));
  EXPECT_LT(static_cast<double>(predicted), 1.3 * static_cast<double>(measured));
}

INSTANTIATE_TEST_SUITE_P(Layouts, MemoryPrediction, testing::ValuesIn(of_this_world()),
                         [](const auto& info) { return std::string("L_") + info.param.name; });

}  // namespace
}  // namespace lockstep::train
