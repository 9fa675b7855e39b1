// SPDX-License-Identifier: Apache-2.0
// What built-in models take under configurations.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lockstep/config/plan/fit_to_memory.h"
#include "lockstep/config/plan/planned_run.h"
#include "lockstep/core/error.h"
#include "lockstep/core/size_text.h"
#include "lockstep/plan/memory.h"

namespace lockstep::config {
namespace {

using layout::PipelineSchedule;
using layout::Recompute;
using layout::ShardingStrategy;
using plan::Memory;
using plan::memory_per_rank;
using testing::AllOf;
using testing::Each;
using testing::HasSubstr;
using testing::ThrowsMessage;

// Counted by hand: hidden 8, ffn 32, vocab 10, 4 positions.
constexpr int64_t kBlock = 2 * 16 + (24 * 8 + 24) + (8 * 8 + 8) + (32 * 8 + 32) + (8 * 32 + 8);
constexpr int64_t kEmbed = 80, kPositions = 32, kNorm = 16;

TrainConfig small() {
  TrainConfig config;
  config.data.path = "any";
  config.model = {.layers = 4, .hidden = 8, .heads = 2, .vocab = 10, .positions = 4};
  config.train.seq_len = 4;
  config.train.micro_batch = 1;
  config.train.device = DeviceKind::cpu;
  return config;
}

std::vector<Memory> plan_for(const TrainConfig& config, int world) {
  config.validate(world);
  return memory_per_rank(
      planned_run(config, config.model.resolved(config.train.seq_len, 256), world));
}

// One that does not fit into a rank, and whose parts are larger than what is added to align them.
TrainConfig large() {
  TrainConfig config = small();
  config.model = {.layers = 8, .hidden = 512, .heads = 8, .vocab = 4096};
  config.train.seq_len = 256;
  config.train.micro_batch = 4;
  return config;
}

int64_t activations(const TrainConfig& config, int world = 1) {
  return plan_for(config, world)[0].activations;
}

TEST(Memory, CountsParametersGradientsAndState) {
  TrainConfig config = small();
  const int64_t all = 4 * kBlock + kEmbed + kPositions + kNorm;
  const Memory memory = plan_for(config, 1)[0];
  EXPECT_EQ(memory.parameters, 4 * all);
  EXPECT_EQ(memory.gradients, 4 * all);
  EXPECT_EQ(memory.optimizer, 8 * all);
  EXPECT_EQ(memory.buffers, 0);
  EXPECT_EQ(memory.state(), 16 * all);
  EXPECT_EQ(memory.total(), 16 * all + memory.activations);
  EXPECT_GT(memory.activations, 0);

  config.optim.moments = Precision::bfloat16;
  EXPECT_EQ(plan_for(config, 1)[0].optimizer, 4 * all);
  config.train.dtype = Precision::bfloat16;  // which has a master
  EXPECT_EQ(plan_for(config, 1)[0].optimizer, 8 * all);
  config = small();

  config.optim.name = OptimizerKind::sgd;
  EXPECT_EQ(plan_for(config, 1)[0].optimizer, 0);
  config.optim.momentum = 0.9;
  EXPECT_EQ(plan_for(config, 1)[0].optimizer, 4 * all);
}

TEST(Memory, FrozenParametersHaveNoGradientsAndNoState) {
  TrainConfig config = small();
  const Memory plain = plan_for(config, 1)[0];
  config.train.freeze = "embed.*,blocks.1.*";
  const int64_t trained = 3 * kBlock + kPositions + kNorm;
  const Memory memory = plan_for(config, 1)[0];
  EXPECT_EQ(memory.parameters, plain.parameters);
  EXPECT_EQ(memory.gradients, 4 * trained);
  EXPECT_EQ(memory.optimizer, 8 * trained);
  EXPECT_LT(memory.total(), plain.total());

  // One matrix of each block, shared out or not; and the last stage's copy of the embedding.
  config = large();
  const auto all = plan_for(config, 2)[0];
  config.train.freeze = "*.mlp.up.weight,embed.weight";
  const int64_t frozen = 8 * 4 * 512 * 512 + 4096 * 512;
  const auto whole = plan_for(config, 2)[0];
  EXPECT_EQ(whole.parameters, all.parameters);
  EXPECT_EQ(whole.gradients, all.gradients - 4 * frozen);
  EXPECT_EQ(whole.optimizer, all.optimizer - 8 * frozen);
  config.parallel.shard = ShardingStrategy::full_shard;
  for (const Memory& rank : plan_for(config, 2)) {
    EXPECT_NEAR(static_cast<double>(rank.optimizer), static_cast<double>(whole.optimizer) / 2,
                0.01 * static_cast<double>(whole.optimizer));
    EXPECT_NEAR(static_cast<double>(rank.gradients), static_cast<double>(whole.gradients) / 2,
                0.01 * static_cast<double>(whole.gradients));
  }
  config.parallel.shard = ShardingStrategy::no_shard;
  config.parallel.pp = 2;
  const auto stages = plan_for(config, 2);
  EXPECT_EQ(stages[0].optimizer + stages[1].optimizer, whole.optimizer);
  EXPECT_EQ(stages[0].gradients + stages[1].gradients, 4 * whole.optimizer / 8);
}

TEST(Memory, SixteenBitParametersHaveAMaster) {
  TrainConfig config = large();
  const Memory whole = plan_for(config, 1)[0];
  config.train.dtype = Precision::bfloat16;
  const Memory half = plan_for(config, 1)[0];
  EXPECT_EQ(2 * half.parameters, whole.parameters);
  EXPECT_EQ(2 * half.gradients, whole.gradients);
  EXPECT_EQ(half.optimizer, whole.optimizer + whole.parameters);
}

TEST(Memory, OfStages) {
  TrainConfig config = small();
  config.parallel.pp = 2;
  config.train.global_batch = 2;
  const int64_t first = 2 * kBlock + kEmbed + kPositions, last = 2 * kBlock + kNorm + kEmbed;
  auto ranks = plan_for(config, 2);
  EXPECT_EQ(ranks[0].parameters, 4 * first);
  EXPECT_EQ(ranks[1].parameters, 4 * last);
  EXPECT_EQ(ranks[0].optimizer, 8 * first);
  EXPECT_EQ(ranks[1].optimizer, 8 * (last - kEmbed)) << "of a copy the optimizer has nothing";

  config.parallel.split = {1, 5};
  ranks = plan_for(config, 2);
  EXPECT_EQ(ranks[0].parameters, 4 * (kEmbed + kPositions));
  EXPECT_EQ(ranks[1].parameters, 4 * (4 * kBlock + kNorm + kEmbed));

  config = small();
  config.parallel.pp = 2;
  config.parallel.chunks = 2;
  config.train.global_batch = 4;
  ranks = plan_for(config, 4);  // dp 2, each with stages 0 and 2, or 1 and 3
  EXPECT_EQ(ranks[0], ranks[2]);
  EXPECT_EQ(ranks[1], ranks[3]);
  EXPECT_EQ(ranks[0].parameters, 4 * first);
  EXPECT_EQ(ranks[1].parameters, 4 * last);
}

TEST(Memory, BucketsAreAligned) {
  const Memory memory = plan_for(small(), 2)[0];
  // Of a block: four norms and biases of 8, one of 24, one of 32 and one of 8, each 256 bytes.
  const int64_t block = 4 * (24 * 8 + 8 * 8 + 32 * 8 + 8 * 32) + 256 * (4 + 2 + 1 + 1);
  EXPECT_EQ(memory.gradients, 4 * block + 512 + 256 + 2 * 256);
}

TEST(Memory, SharesAreFractions) {
  TrainConfig config = large();
  const Memory whole = plan_for(config, 4)[0];
  const auto share = [&](ShardingStrategy shard, int size = 0) {
    config.parallel.shard = shard;
    config.parallel.shard_size = size;
    return plan_for(config, 4)[0];
  };
  const auto near = [](int64_t a, int64_t b) { EXPECT_NEAR(1.0 * a / b, 1, 0.02); };
  const Memory full = share(ShardingStrategy::full_shard),
               grad_op = share(ShardingStrategy::shard_grad_op);
  near(4 * full.parameters, whole.parameters);
  near(4 * full.gradients, whole.gradients);
  near(4 * full.optimizer, whole.optimizer);
  EXPECT_EQ(grad_op.parameters, full.parameters);
  EXPECT_GT(grad_op.buffers, full.buffers + whole.parameters / 2);
  EXPECT_EQ(grad_op.activations, full.activations);

  const Memory optimizer = share(ShardingStrategy::optimizer),
               hybrid = share(ShardingStrategy::hybrid_shard, 2);
  near(optimizer.parameters, whole.parameters);
  near(4 * optimizer.optimizer, whole.optimizer);
  near(2 * hybrid.parameters, whole.parameters);
  near(2 * hybrid.optimizer, whole.optimizer);
}

TEST(Memory, AShareOfOneIsTheWhole) {
  TrainConfig config = large();
  const Memory alone = plan_for(config, 1)[0], copies = plan_for(config, 2)[0];
  config.parallel.shard = ShardingStrategy::full_shard;
  EXPECT_EQ(plan_for(config, 1)[0], alone);
  config.parallel.shard = ShardingStrategy::hybrid_shard;
  config.parallel.shard_size = 1;
  EXPECT_EQ(plan_for(config, 2)[0], copies);
}

// Sums of 4 micro-batches need two copies of the gradients, with a pipeline, where the last one is
// pushed too, no more; of 8 three.
TEST(Memory, ReproducibleSumsHaveCopies) {
  TrainConfig config = large();
  config.train.reproducible = true;
  const auto copies = [&](int64_t micro_batches) {
    config.train.global_batch = 4 * micro_batches;
    const Memory memory = plan_for(config, 1)[0];
    return static_cast<double>(memory.buffers) / static_cast<double>(memory.gradients);
  };
  EXPECT_EQ(copies(1), 0);
  EXPECT_EQ(copies(2), 1);
  EXPECT_EQ(copies(4), 2);
  EXPECT_EQ(copies(8), 3);
}

TEST(Memory, SharesOfAllRanksAddUpToTheWhole) {
  TrainConfig config = large();
  config.model.hidden = 520;  // does not divide
  config.model.heads = 4;
  int64_t whole = plan_for(config, 1)[0].optimizer, sum = 0;
  config.parallel.shard = ShardingStrategy::full_shard;
  for (const Memory& rank : plan_for(config, 3)) sum += rank.optimizer;
  // What is smaller than 1000 elements every rank has: four of 520 in a block, and two.
  EXPECT_EQ(sum - whole, 2 * 8 * ((8 * 6 + 2) * 520));
}

// On two ranks, whose gradients are always there.
TEST(Memory, RecomputeKeepsLess) {
  TrainConfig config = large();
  config.model.vocab = 64;
  const int64_t stream = 4 * 256 * 512 * 4;  // (B, T, C)
  const int64_t none = activations(config, 2);
  config.train.recompute = Recompute::selective;
  const int64_t selective = activations(config, 2);
  config.train.recompute = Recompute::full;
  const int64_t full = activations(config, 2);
  // Of 16 streams, 10 are left, or 1; and one block is there again in backward.
  EXPECT_NEAR(static_cast<double>(none - selective) / stream, 7 * 6, 2);
  EXPECT_NEAR(static_cast<double>(none - full) / stream, 7 * 15, 14);
}

// Reproducible, so that there are buckets and no gradients of micro-batches wait.
TEST(Memory, TiedEmbeddingsHaveTwoGradientsAtATime) {
  TrainConfig config = large();
  config.train.reproducible = true;
  config.train.seq_len = 2;
  config.model.layers = 1;
  config.model.vocab = 1 << 16;
  const int64_t table = config.model.vocab * config.model.hidden * 4;
  const int64_t tied = activations(config);
  EXPECT_GE(tied, 2 * table);
  EXPECT_LT(tied, 2 * table + table / 10);
  config.train.global_batch = 8;
  EXPECT_EQ(activations(config), tied);
  config.model.tied = false;
  EXPECT_LT(activations(config), table + table / 10);
}

TEST(Memory, ExtremeKeepsNoInputs) {
  TrainConfig config = large();
  config.model.vocab = 64;
  config.memory.strategy = layout::MemoryStrategy::aggressive;
  const int64_t in_memory = activations(config, 2);
  config.memory.strategy = layout::MemoryStrategy::extreme;
  config.model.layers = 8;
  const int64_t on_disk = activations(config, 2);
  EXPECT_LT(on_disk, in_memory - 5 * (4 * 256 * 512 * 4));
  config.model.layers = 16;
  EXPECT_EQ(activations(config, 2), on_disk);
}

TEST(Memory, FollowsTheSchedule) {
  TrainConfig config = large();
  config.parallel.pp = 4;
  config.parallel.schedule = PipelineSchedule::gpipe;
  const auto with = [&](PipelineSchedule schedule, int64_t micro_batches) {
    config.parallel.schedule = schedule;
    config.train.global_batch = 4 * micro_batches;
    return plan_for(config, 4)[0].activations;
  };
  const int64_t few = with(PipelineSchedule::gpipe, 8);
  const int64_t many = with(PipelineSchedule::gpipe, 16);
  EXPECT_GT(many, 19 * few / 10);
  EXPECT_EQ(with(PipelineSchedule::one_f_one_b, 8), with(PipelineSchedule::one_f_one_b, 16));
  EXPECT_LT(with(PipelineSchedule::one_f_one_b, 16), few);
  const auto ranks = plan_for(config, 4);
  EXPECT_GT(ranks[0].activations, ranks[2].activations) << "the first stage holds most";
}

TEST(Memory, OfTensorParallelRanks) {
  TrainConfig config = large();
  config.model.kind = ModelKind::llama;
  config.model.tied = false;
  config.model.vocab = 256;
  const Memory whole = plan_for(config, 1)[0];
  config.parallel.tp = 4;
  // The configuration may refuse what the model cannot do yet: the plan need not.
  const ModelSpec model = config.model.resolved(config.train.seq_len, 256);
  const Memory share = memory_per_rank(planned_run(config, model, 4))[0];
  EXPECT_NEAR(4.0 * static_cast<double>(share.parameters) / static_cast<double>(whole.parameters),
              1, 0.02);
  // What norms and sums keep is whole on each rank.
  EXPECT_LT(share.activations, 7 * whole.activations / 10);
  config.parallel.sequence_parallel = true;
  EXPECT_LT(memory_per_rank(planned_run(config, model, 4))[0].activations, share.activations);
}

TEST(Memory, OfManyRanks) {
  TrainConfig config = large();
  config.model = {.kind = ModelKind::llama, .layers = 128, .hidden = 8192, .heads = 64};
  config.model.vocab = 128000;
  config.parallel.pp = 16;
  config.parallel.schedule = PipelineSchedule::one_f_one_b;
  config.train.global_batch = 4 * 64 * 256;
  const auto ranks = plan_for(config, 1024);
  ASSERT_EQ(ranks.size(), 1024u);
  EXPECT_EQ(ranks[1], ranks[17]);
}

// As few blocks as the limit allows, spread over the model; and never more than it allows.
TEST(Memory, FitRecomputesAsLittleAsTheLimitAllows) {
  TrainConfig config = large();
  config.parallel.pp = 2;
  config.train.global_batch = 16;
  config.model = config.model.resolved(config.train.seq_len, 4096);
  const auto peak = [&](const TrainConfig& of) {
    const auto ranks = plan_for(of, 2);
    return std::max(ranks[0].total(), ranks[1].total());
  };
  const auto with = [&](int64_t selective, int64_t full) {
    TrainConfig other = config;
    other.train.fit = RecomputedBlocks{selective, full};
    return other;
  };
  const int64_t none = peak(with(0, 0)), all = peak(with(0, 8));
  ASSERT_LT(all, none * 3 / 4);
  int64_t before = 0;
  for (int percent = 0; percent <= 110; percent += 10) {
    const int64_t limit = (all + (none - all) * percent / 100) * 100 / 94 + 100;
    TrainConfig fitted = with(0, 0);
    fit_to_memory(fitted, config.model, 2, limit);
    const auto [selective, full] = *fitted.train.fit;
    EXPECT_LE(peak(fitted), limit * 94 / 100 + 100) << percent;
    const int64_t level = selective + 2 * full;
    for (int64_t less = 0; less < level; ++less) {
      const auto other = less <= 8 ? with(less, 0) : with(16 - less, less - 8);
      EXPECT_GT(peak(other), limit / 100 * 94) << percent << " " << less;
    }
    if (percent > 0) {
      EXPECT_LE(level, before);
    }
    before = level;
    int64_t found_full = 0, found_selective = 0;
    for (int64_t i = 0; i < 8; ++i) {
      found_full += fitted.recompute_of(i) == Recompute::full ? 1 : 0;
      found_selective += fitted.recompute_of(i) == Recompute::selective ? 1 : 0;
    }
    EXPECT_EQ(found_full, full);
    EXPECT_EQ(found_selective, selective);
  }
  EXPECT_EQ(before, 0);
  EXPECT_NE(with(0, 4).recompute_of(0), with(0, 4).recompute_of(1));
  TrainConfig fitted = with(0, 0);
  EXPECT_THROW(fit_to_memory(fitted, config.model, 2, all), ConfigError);
}

// Tiles cost time: only where the peak needs them.
TEST(Memory, LongRowsAreCutIntoTilesWhereTheyMustBe) {
  TrainConfig config = large();
  config.train.seq_len = 4 * kLongRow;
  config.train.micro_batch = 1;
  config.model.positions = config.train.seq_len;
  const auto peak = [&](std::optional<int64_t> tile) {
    TrainConfig other = config;
    other.train.tile = tile;
    return plan_for(other, 1)[0].total();
  };
  const int64_t whole = peak(0), tiled = peak(kLongTile);
  ASSERT_LT(tiled, whole);
  EXPECT_EQ(peak(std::nullopt), tiled);  // no limit is known
  const auto tile_in = [&](int64_t bytes, bool fit) {
    TrainConfig fitted = config;
    if (fit) fitted.train.fit = RecomputedBlocks{};
    fit_to_memory(fitted, config.model, 1, bytes / 94 * 100 + 100);
    return fitted.tile();
  };
  EXPECT_EQ(tile_in(whole, false), 0);
  EXPECT_EQ(tile_in(whole - (1 << 20), false), kLongTile);
  EXPECT_EQ(tile_in(1 << 20, false), kLongTile);
  EXPECT_EQ(tile_in(whole - (1 << 20), true), 0);  // recomputation is enough
  config.train.tile = 0;
  EXPECT_EQ(tile_in(1 << 20, false), 0);
}

TEST(Memory, RefusesStateThatDoesNotFit) {
  TrainConfig config = large();
  const ModelSpec model = config.model.resolved(256, 256);
  EXPECT_NO_THROW(require_state_fits(config, model, 1));
  const int64_t state = plan_for(config, 1)[0].state();
  config.memory.max_per_device = state;
  EXPECT_NO_THROW(require_state_fits(config, model, 1));
  config.memory.max_per_device = state - 1;
  EXPECT_THAT([&] { require_state_fits(config, model, 1); },
              ThrowsMessage<ConfigError>(AllOf(HasSubstr("memory.max_per_device is "),
                                               HasSubstr("rank 0 needs " + size_text(state)),
                                               HasSubstr("optimizer state"))));
  config.parallel.shard = ShardingStrategy::full_shard;
  EXPECT_NO_THROW(require_state_fits(config, model, 2));
}

}  // namespace
}  // namespace lockstep::config
