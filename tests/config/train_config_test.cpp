// SPDX-License-Identifier: Apache-2.0
#include "lockstep/config/train_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "lockstep/config/freeze.h"
#include "lockstep/config/pipeline_choice.h"
#include "lockstep/core/error.h"
#include "tests/support/says.h"

namespace lockstep::config {
namespace {

using layout::MemoryStrategy;
using layout::Recompute;
using test::says;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using testing::ThrowsMessage;

TrainConfig valid() {
  TrainConfig config;
  config.data.path = "data.txt";
  return config;
}

using Change = std::function<void(TrainConfig&)>;

void expect_refused(int world, const Change& change, const std::string& message) {
  TrainConfig config = valid();
  change(config);
  EXPECT_THAT([&] { config.validate(world); }, ThrowsMessage<ConfigError>(says(message)));
}

void expect_valid(int world, const Change& change) {
  TrainConfig config = valid();
  change(config);
  EXPECT_NO_THROW(config.validate(world));
}

TEST(TrainConfig, DefaultsAreValidWithData) {
  for (const int world : {1, 2, 3, 8}) EXPECT_NO_THROW(valid().validate(world));
  EXPECT_THAT([] { TrainConfig{}.validate(1); },
              ThrowsMessage<ConfigError>(says("data.path is empty ... token file")));
}

TEST(TrainConfig, RanksMustMatch) {
  expect_valid(4, [](auto& c) { c.parallel.dp = 4; });
  expect_refused(
      4, [](auto& c) { c.parallel.dp = 3; },
      "parallel.dp 3 x tp 1 x pp 1 = 3 ... 4 ranks ... parallel.dp 0");
  expect_refused(
      4, [](auto& c) { c.parallel.tp = 3; },
      "4 ranks ... divisible by parallel.tp 3 x parallel.pp 1 = 3");
  expect_refused(
      0, [](auto&) {}, "0 ranks ... at least 1");
}

TEST(TrainConfig, NamesLikeThoseOfOtherProgramsAreNearTheSameBlock) {
  TrainConfig config = valid();
  const ModelSpec model = config.model.resolved(16, 20);
  for (const char* pattern : {"layers.1.*", "model.layers.1.*"}) {
    config.train.freeze = pattern;
    EXPECT_THAT([&] { frozen_tensors(config, model); },
                ThrowsMessage<ConfigError>(AllOf(HasSubstr("blocks.1."), HasSubstr("same flags"),
                                                 Not(HasSubstr("blocks.0.")))));
  }
}

TEST(TrainConfig, DpTakesWhatIsLeft) {
  TrainConfig config = valid();
  EXPECT_EQ(config.dp(6), 6);
  config.parallel.tp = 2;
  config.parallel.pp = 3;
  EXPECT_EQ(config.dims(12), (layout::ParallelDims{2, 2, 3}));
}

TEST(TrainConfig, BatchAndAccumulation) {
  TrainConfig config = valid();
  EXPECT_EQ(config.accumulation(2), 1);
  EXPECT_EQ(config.global_batch(2), 16);
  config.train.global_batch = 48;
  EXPECT_EQ(config.accumulation(2), 3);
  EXPECT_EQ(config.accumulation(1), 6);
  EXPECT_EQ(config.global_batch(2), 48);
  EXPECT_NO_THROW(config.validate(2));
  EXPECT_EQ(config.accumulation(4), 2);  // the last rank has none of the six
  EXPECT_NO_THROW(config.validate(4));
  EXPECT_EQ(parallel_config(config, 4).microbatches(), 2);
  expect_refused(
      2, [](auto& c) { c.train.global_batch = 20; },
      "train.global_batch is 20 ... multiple of train.micro_batch 8: 16 or 24");
  expect_refused(
      2, [](auto& c) { c.train.global_batch = 8; },
      "train.global_batch 8 / train.micro_batch 8 = 1 ... at least 2 ... train.global_batch 16");
  expect_refused(
      4, [](auto& c) { c.train.micro_batch = 1 << 30; },
      "train.micro_batch 1073741824 x dp 4 and train.global_batch 0 must be below 2^31");
}

TEST(TrainConfig, RangesHoldForValuesSetInCode) {
  expect_refused(
      1, [](auto& c) { c.train.steps = 0; }, "train.steps is 0 ... whole number ... at least 1");
  expect_refused(
      1, [](auto& c) { c.train.micro_batch = 0; },
      "train.micro_batch is 0 ... whole number ... at least 1");
  expect_refused(
      1, [](auto& c) { c.train.seq_len = -1; },
      "train.seq_len is -1 ... whole number ... at least 1");
  expect_refused(
      1,
      [](auto& c) {
        c.optim.betas = {0.9, 1};
      },
      "optim.betas is [0.9, 1] ... list of numbers ... at least 0 ... below 1");
  expect_refused(
      1, [](auto& c) { c.optim.betas = {0.9}; }, "optim.betas has 1 numbers, must have 2");
  expect_refused(
      1, [](auto& c) { c.optim.schedule = "square"; },
      "optim.schedule is \"square\" ... constant, linear, cosine, wsd");
  expect_refused(
      1, [](auto& c) { c.comm.timeout = -1; },
      "comm.timeout is -1.0 ... number ... at least 0 ... at most 604800");
}

TEST(TrainConfig, ModelRules) {
  expect_refused(
      1, [](auto& c) { c.model.heads = 3; }, "[model] ... hidden is 128 ... divisible by 3 heads");
  expect_refused(
      1, [](auto& c) { c.model.positions = 100; },
      "train.seq_len is 256 ... at most model.positions 100");
  expect_valid(1, [](auto& c) { c.model.positions = 256; });
  expect_valid(1, [](auto& c) {  // the folder's sizes count, not these
    c.model.heads = 3;
    c.model_path = "folder";
  });
}

TEST(TrainConfig, WarmupAndDecay) {
  TrainConfig config = valid();
  EXPECT_EQ(config.warmup(), 100);
  config.train.steps = 50;
  EXPECT_EQ(config.warmup(), 5);
  EXPECT_NO_THROW(config.validate(1));
  config.train.steps = 1;
  EXPECT_NO_THROW(config.validate(1));
  config.optim.warmup = 0;
  EXPECT_EQ(config.warmup(), 0);
  expect_refused(
      1, [](auto& c) { c.optim.warmup = 1001; },
      "optim.warmup is 1001 ... at most train.steps 1000");
  expect_refused(
      1, [](auto& c) { c.optim.warmup = 1000; },
      "optim.warmup is 1000 ... below train.steps 1000 ... cosine");
  expect_valid(1, [](auto& c) {
    c.optim.warmup = 1000;
    c.optim.schedule = "constant";
  });
  expect_refused(
      1, [](auto& c) { c.optim.schedule = "wsd"; },
      "optim.decay_steps is 0 ... at least 1 for wsd ... 200");
  expect_refused(
      1, [](auto& c) { c.optim.decay_steps = 901; },
      "optim.decay_steps is 901 ... at most 900: train.steps 1000 - warm-up 100");
  expect_valid(1, [](auto& c) { c.optim.decay_steps = 900; });
}

TEST(TrainConfig, MomentumIsOfSgd) {
  expect_refused(
      1, [](auto& c) { c.optim.lr = 0; }, "optim.lr is 0 ... greater than 0");
  expect_refused(
      1, [](auto& c) { c.optim.momentum = 0.9; },
      "optim.momentum is 0.9, must be 0 for adamw, which has betas");
  expect_valid(1, [](auto& c) {
    c.optim.momentum = 0.9;
    c.optim.name = OptimizerKind::sgd;
  });
}

TEST(TrainConfig, SmallMomentsAreOfAdamW) {
  expect_valid(1, [](auto& c) { c.optim.moments = Precision::bfloat16; });
  expect_refused(
      1,
      [](auto& c) {
        c.optim.moments = Precision::bfloat16;
        c.optim.name = OptimizerKind::sgd;
      },
      "optim.moments is bfloat16, must be float32 for optim.name sgd");
}

TEST(TrainConfig, ValidationIsAFractionOrAFile) {
  EXPECT_EQ(valid().data.validation_fraction(), 0.05);
  expect_refused(
      1, [](auto& c) { c.data.validation = "0.6"; },
      "data.validation is 0.6 ... at least 0 ... at most 0.5, or a file");
  expect_valid(1, [](auto& c) {
    c.data.validation = "held_out.txt";
    c.train.eval_every = 5;
  });
  expect_valid(1, [](auto& c) { c.data.validation = "0"; });
  expect_refused(
      1,
      [](auto& c) {
        c.data.validation = "0";
        c.train.eval_every = 5;
      },
      "train.eval_every is 5 ... data.validation is 0");
}

TEST(TrainConfig, CheckpointsNeedAFolder) {
  expect_valid(1, [](auto& c) { c.checkpoint.dir = ""; });
  expect_refused(
      1,
      [](auto& c) {
        c.checkpoint.dir = "";
        c.checkpoint.every = 5;
      },
      "checkpoint.every is 5, but checkpoint.dir is empty");
  expect_refused(
      1,
      [](auto& c) {
        c.checkpoint.dir = "";
        c.checkpoint.resume = "auto";
      },
      "checkpoint.resume is auto, but checkpoint.dir is empty");
}

TEST(TrainConfig, StrategyDecidesRecomputation) {
  const auto recompute = [](MemoryStrategy strategy, std::optional<Recompute> explicit_choice) {
    TrainConfig config = valid();
    config.memory.strategy = strategy;
    config.train.recompute = explicit_choice;
    return config.recompute();
  };
  EXPECT_EQ(valid().recompute(), Recompute::none);
  EXPECT_EQ(recompute(MemoryStrategy::standard, std::nullopt), Recompute::selective);
  EXPECT_EQ(recompute(MemoryStrategy::aggressive, std::nullopt), Recompute::full);
  EXPECT_EQ(recompute(MemoryStrategy::aggressive, Recompute::none), Recompute::none);
  EXPECT_EQ(recompute(MemoryStrategy::basic, Recompute::full), Recompute::full);
}

TEST(TrainConfig, ThreadsAndTimeout) {
  TrainConfig config = valid();
  EXPECT_EQ(config.threads(4), 4);
  EXPECT_EQ(config.threads(0), 1);
  config.train.reproducible = true;
  EXPECT_EQ(config.threads(4), 1);
  config.train.threads = 3;
  EXPECT_EQ(config.threads(4), 3);
  config.comm.timeout = 0.25;
  EXPECT_EQ(config.timeout(), milliseconds{250});
}

TEST(TrainConfig, CompressionIsForWholeModels) {
  const auto with = [](auto change) {
    return [change](auto& c) {
      c.comm.compression = "bf16-across-hosts";
      change(c);
    };
  };
  expect_refused(2, with([](auto& c) { c.parallel.shard = layout::ShardingStrategy::full_shard; }),
                 "comm.compression is bf16-across-hosts ... parallel.shard is full");
  expect_refused(2, with([](auto& c) { c.train.reproducible = true; }),
                 "comm.compression is bf16-across-hosts ... train.reproducible is true");
}

TEST(TrainConfig, StrategiesAreNotForNccl) {
  expect_refused(
      2,
      [](auto& c) {
        c.comm.backend = "nccl";
        c.comm.strategy = layout::CommStrategy::ring;
      },
      "comm.strategy is ring ... comm.backend is nccl");
}

TEST(TrainConfig, TensorParallelRanksDivideTheModel) {
  expect_refused(
      3, [](auto& c) { c.parallel.tp = 3; }, "model.heads is 4 ... divisible by parallel.tp 3");
  expect_refused(
      2,
      [](auto& c) {
        c.parallel.tp = 2;
        c.model.ffn = 511;
      },
      "model.ffn is 511 ... divisible by parallel.tp 2");
  expect_refused(
      4,
      [](auto& c) {
        c.parallel.tp = 4;
        c.model.vocab = 3;
      },
      "model.vocab is 3 ... at least parallel.tp 4");
  expect_refused(
      2, [](auto& c) { c.parallel.sequence_parallel = true; },
      "parallel.sequence_parallel is true, but parallel.tp is 1: leave it out");
  expect_refused(
      2,
      [](auto& c) {
        c.parallel.tp = 2;
        c.parallel.sequence_parallel = true;
        c.train.seq_len = 33;
      },
      "train.seq_len is 33 ... divisible by parallel.tp 2");
}

TEST(TrainConfig, AFolderForActivationsIsForExtreme) {
  TrainConfig config = valid();
  config.memory = {.strategy = MemoryStrategy::extreme, .disk = "/scratch"};
  config.validate(2);
  expect_refused(
      2, [](auto& c) { c.memory.disk = "/scratch"; },
      "memory.disk is /scratch ... memory.strategy is basic ... extreme");
}

// Rules of the schedules themselves are tested with them.
TEST(TrainConfig, PipelinesFitTheModel) {
  using layout::PipelineSchedule;
  expect_refused(
      2, [](auto& c) { c.parallel.chunks = 2; },
      "parallel.chunks is 2, but parallel.pp is 1: leave it out");
  expect_refused(
      2, [](auto& c) { c.parallel.schedule = PipelineSchedule::gpipe; },
      "parallel.schedule is gpipe, but parallel.pp is 1: leave it out");
  expect_refused(
      2,
      [](auto& c) {
        c.parallel.split = {3, 3};
      },
      "parallel.split has 2 numbers, but parallel.pp is 1: leave it out");
  expect_refused(
      3, [](auto& c) { c.parallel.pp = 3; },
      "model.layers is 4 ... multiple ... parallel.pp 3 ... parallel.split");
  const auto more_stages_than_layers = [](auto& c) {
    c.parallel.pp = 4;
    c.parallel.chunks = 2;
    c.train.global_batch = 32;
  };
  expect_refused(4, more_stages_than_layers,
                 "model.layers is 4 ... multiple ... parallel.pp 4 x parallel.chunks 2 = 8 ... "
                 "parallel.split");
  const auto wrong_split = [](auto& c) {
    c.parallel.pp = 2;
    c.parallel.split = {1, 4};
  };
  expect_refused(2, wrong_split,
                 "parallel.split is 1, 4: 2 stages with 5 layers, must be 2 stages (parallel.pp 2) "
                 "with 6 layers: model.layers 4, embeddings and head");
  const auto half_a_layer = [](auto& c) {
    c.parallel.pp = 2;
    c.parallel.split = {1.5, 4.5};
  };
  expect_refused(2, half_a_layer, "parallel.split has 1.5 ... whole numbers from 1");
  const auto too_few_microbatches = [](auto& c) {
    c.parallel.pp = 2;
    c.parallel.chunks = 2;
    c.parallel.schedule = PipelineSchedule::dualpipe_v;
  };
  expect_refused(
      2, too_few_microbatches,
      "[schedule] ... dualpipe-v ... microbatches is 1 ... at least twice ... 4 ... ranks: "
      "parallel.pp; microbatches: train.global_batch 8 / (train.micro_batch 8 x dp 1)");
  const auto chunks_of_1f1b = [](auto& c) {
    c.parallel.pp = 2;
    c.parallel.chunks = 2;
    c.parallel.schedule = PipelineSchedule::one_f_one_b;
  };
  expect_refused(2, chunks_of_1f1b,
                 "[schedule] ... 1f1b ... chunks is 2 ... one chunk ... interleaved, looped-bfs, "
                 "zb-1p, zb-v and dualpipe-v ... ranks: parallel.pp; microbatches: "
                 "train.global_batch 8 / (train.micro_batch 8 x dp 1)");

  TrainConfig config = valid();
  config.parallel.pp = 2;
  config.parallel.chunks = 2;
  config.train.global_batch = 32;
  config.validate(4);
  EXPECT_EQ(schedule_options(config, 4).kind, PipelineSchedule::interleaved);
  EXPECT_EQ(schedule_options(config, 4).microbatches, 2);
  EXPECT_EQ(layers_per_stage(config.parallel, 4), (std::vector<int>{2, 1, 1, 2}));
  config.parallel.split = {1, 2, 2, 1};
  config.validate(4);
  EXPECT_EQ(layers_per_stage(config.parallel, 4), (std::vector<int>{1, 2, 2, 1}));
}

TEST(TrainConfig, ShardSizeBelongsToHybrid) {
  expect_refused(
      4, [](auto& c) { c.parallel.shard_size = 2; },
      "parallel.shard_size is 2 ... parallel.shard is none ... hybrid");
  const auto hybrid = [](auto& c) {
    c.parallel.shard = layout::ShardingStrategy::hybrid_shard;
    c.parallel.shard_size = 3;
  };
  expect_refused(4, hybrid, "parallel.shard_size 3 must divide the 4 data-parallel ranks");
  expect_refused(
      4, [](auto& c) { c.parallel.shard_granularity = layout::ShardGranularity::tensors; },
      "parallel.shard_granularity is tensors ... parallel.shard is none");
}

// Every enum's names stand in the order of its values.
TEST(TrainConfig, NamesOfChoices) {
  TrainConfig config;
  Schema schema = train_schema(config);
  const auto set = [&](const char* name, const char* text) { schema.set_flag(name, text); };
  set("model.kind", "llama");
  set("train.dtype", "bfloat16");
  set("train.device", "cuda");
  set("train.recompute", "selective");
  set("optim.name", "sgd");
  set("parallel.shard", "optimizer");
  set("parallel.schedule", "round_robin");
  set("memory.strategy", "aggressive");
  set("comm.strategy", "adaptive");
  EXPECT_EQ(config.model.kind, ModelKind::llama);
  EXPECT_EQ(config.train.dtype, Precision::bfloat16);
  EXPECT_EQ(config.train.device, DeviceKind::cuda);
  EXPECT_EQ(config.train.recompute, Recompute::selective);
  EXPECT_EQ(config.optim.name, OptimizerKind::sgd);
  EXPECT_EQ(config.parallel.shard, layout::ShardingStrategy::optimizer);
  EXPECT_EQ(config.parallel.schedule, layout::PipelineSchedule::round_robin);
  EXPECT_EQ(config.memory.strategy, MemoryStrategy::aggressive);
  EXPECT_EQ(config.comm.strategy, layout::CommStrategy::adaptive);
  for (const char* name : {"none", "full", "grad_op", "optimizer", "hybrid"}) {
    set("parallel.shard", name);
    EXPECT_EQ(name_of(config.parallel.shard), name);
  }
  for (const char* name : {"tensors", "rows"}) {
    set("parallel.shard_granularity", name);
    EXPECT_EQ(name_of(config.parallel.shard_granularity), name);
  }
  for (const char* name : {"gpipe", "1f1b", "interleaved", "zb-v", "file"}) {
    set("parallel.schedule", name);
    EXPECT_EQ(layout::name_of(*config.parallel.schedule), name);
  }
}

TEST(TrainConfig, GraphsAreOfWholeModelsWhoseStepsAreAlike) {
  expect_valid(1, [](auto& c) { c.train.graphs = Graphs::on; });
  expect_valid(4, [](auto& c) { c.parallel.tp = 2; });
  const auto refused = [](const Change& change, const std::string& message) {
    expect_refused(
        4,
        [&](auto& c) {
          c.train.graphs = Graphs::on;
          change(c);
        },
        "train.graphs is on, but " + message + " ... set train.graphs auto");
  };
  refused([](auto& c) { c.parallel.tp = 2; }, "parallel.tp is 2");
  refused([](auto& c) { c.parallel.cp = 2; }, "parallel.cp is 2");
  refused([](auto& c) { c.parallel.pp = 2; }, "parallel.pp is 2");
  refused([](auto& c) { c.parallel.shard = layout::ShardingStrategy::full_shard; },
          "parallel.shard is full");
  refused([](auto& c) { c.memory.strategy = MemoryStrategy::extreme; },
          "memory.strategy is extreme");
  refused([](auto& c) { c.train.reproducible = true; }, "train.reproducible is true");
  refused([](auto& c) { c.model.dropout = 0.1; }, "model.dropout is 0.1");
  refused([](auto& c) { c.data.pack = true; }, "data.pack is true");
  refused([](auto& c) { c.train.device = DeviceKind::cpu; }, "... CPU");
}

TEST(TrainConfig, JsonGoesBothWays) {
  TrainConfig config = valid();
  EXPECT_EQ(train_config_from_json(to_json(config), "x"), config);
  config.model = {.kind = ModelKind::llama,
                  .layers = 2,
                  .kv_heads = 2,
                  .dropout = 0.1,
                  .tied = true,
                  .rope_theta = 5e5,
                  .rope_scaling = RopeScaling{32, 1, 4, 8192}};
  config.train.recompute = Recompute::none;
  config.train.graphs = Graphs::off;
  config.optim.warmup = 7;
  config.memory.max_per_device = int64_t{8} << 30;
  config.parallel.dp = 2;
  config.data.validation = "a file.txt";
  EXPECT_EQ(train_config_from_json(to_json(config), "x"), config);
}

TEST(TrainConfig, RopeScalingIsFourNumbersOrNone) {
  TrainConfig config;
  EXPECT_THAT([&] { train_schema(config).set_flag("model.rope_scaling", "1,2"); },
              ThrowsMessage<ConfigError>(says("model.rope_scaling is [1, 2] ... four numbers")));
}

}  // namespace
}  // namespace lockstep::config
