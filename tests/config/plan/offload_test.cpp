// SPDX-License-Identifier: Apache-2.0
// What of built-in models rests where under configurations.
#include "lockstep/plan/offload.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "lockstep/config/plan/planned_run.h"
#include "lockstep/core/error.h"
#include "lockstep/plan/memory.h"
#include "tests/support/says.h"

namespace lockstep::config {
namespace {

using codec::Codec;
using layout::OffloadPlan;
using layout::ShardingStrategy;
using plan::Memory;
using plan::memory_per_rank;
using plan::plan_offload;
using test::says;
using testing::AllOf;
using testing::ElementsAre;
using testing::Ge;
using testing::HasSubstr;
using testing::Le;
using testing::ThrowsMessage;

constexpr int64_t kMB = int64_t{1} << 20;

TrainConfig large_offloaded() {
  TrainConfig config;
  config.data.path = "any";
  config.model = {.layers = 4, .hidden = 512, .heads = 8, .vocab = 4096};
  config.train.seq_len = 64;
  config.train.micro_batch = 1;
  config.train.device = DeviceKind::cpu;
  return config;
}

ModelSpec model_of(const TrainConfig& config) {
  return config.model.resolved(config.train.seq_len, 256);
}

OffloadPlan only_plan(const TrainConfig& config, int world = 1, int rank = 0) {
  config.validate(world);
  auto plans = plan_offload(planned_run(config, model_of(config), world), rank);
  EXPECT_EQ(plans.size(), 1u);
  return plans[0];
}

std::vector<std::string> names(const OffloadPlan& plan) {
  std::vector<std::string> names;
  for (const auto& flat : plan.flats) names.push_back(flat.sizes.name);
  return names;
}

int64_t device_bytes_of_states(const OffloadPlan& plan) {
  int64_t bytes = 0;
  for (const auto& flat : plan.flats) {
    for (const auto& slice : flat.bytes.states) bytes += slice.on_device;
  }
  return bytes;
}

int64_t elements_of(const OffloadPlan& plan) {
  int64_t elements = 0;
  for (const auto& flat : plan.flats) {
    for (const auto& tensor : flat.sizes.tensors) elements += tensor.count;
  }
  return elements;
}

// Sizes are rounded up to pages.
auto about(int64_t bytes) {
  return AllOf(Ge(bytes), Le(bytes + std::max(bytes / 50, 70 * int64_t{4096})));
}

TEST(OffloadPlan, UnitsAreLayers) {
  TrainConfig config = large_offloaded();
  const OffloadPlan plan = only_plan(config);
  EXPECT_THAT(names(plan), ElementsAre("embed", "positions", "blocks.0", "blocks.1", "blocks.2",
                                       "blocks.3", "norm"));
  const int64_t all = model_of(config).parameters();
  EXPECT_EQ(elements_of(plan), all);
  EXPECT_THAT(device_bytes_of_states(plan), about(8 * all));
  EXPECT_EQ(plan.flats[0].bytes.params, 4 * 4096 * 512);
  EXPECT_EQ(plan.flats[2].bytes.params, plan.flats[5].bytes.params);
  config.model.tied = false;
  EXPECT_EQ(names(only_plan(config)).back(), "head");
}

TEST(OffloadPlan, StateOfSixteenBitParametersHasARemainder) {
  TrainConfig config = large_offloaded();
  config.train.dtype = config::Precision::bfloat16;
  const int64_t all = model_of(config).parameters();
  const OffloadPlan plan = only_plan(config);
  EXPECT_THAT(device_bytes_of_states(plan), about(10 * all));
}

// SGD has a buffer where it has momentum; masters of 16-bit parameters are whole.
TEST(OffloadPlan, StateIsThatOfTheOptimizer) {
  TrainConfig config = large_offloaded();
  config.offload = {.device_limit = 100 * kMB,
                    .advanced = {.strategy = layout::OffloadStrategy::extreme,
                                 .update_site = layout::UpdateSite::device}};
  config.optim.name = OptimizerKind::sgd;
  const int64_t all = model_of(config).parameters();
  const auto bytes = [&](double momentum, config::Precision dtype) {
    config.optim.momentum = momentum;
    config.train.dtype = dtype;
    const OffloadPlan plan = only_plan(config);
    EXPECT_EQ(device_bytes_of_states(plan), plan.on_host.states);
    const Memory memory = memory_per_rank(planned_run(config, model_of(config), 1))[0];
    EXPECT_EQ(memory.optimizer, 0);
    EXPECT_EQ(memory.on_host, plan.on_host.sum() + plan.host_used);
    return plan.on_host.states;
  };
  EXPECT_THAT(bytes(0.9, config::Precision::float32), about(4 * all));
  EXPECT_THAT(bytes(0.9, config::Precision::bfloat16), about(8 * all));
  EXPECT_THAT(bytes(0, config::Precision::bfloat16), about(4 * all));
  EXPECT_EQ(bytes(0, config::Precision::float32), 0);
  // There is no copy of parameters for updates that have no state to come to.
  config.offload.params = config.offload.grads = false;
  config.offload.device_limit = 250 * kMB;
  config.offload.advanced.update_site = layout::UpdateSite::cpu;
  EXPECT_EQ(only_plan(config).on_host.sum(), 0);
}

TEST(OffloadPlan, StateIsEncodedWhereverItRests) {
  TrainConfig config = large_offloaded();
  config.offload.optimizer = true;
  config.offload.codec = {Codec::bf16, Codec::none};
  const int64_t all = model_of(config).parameters();
  EXPECT_THAT(device_bytes_of_states(only_plan(config)), about(6 * all));
  // Embeddings and small tensors keep float32 where others have 8 bits.
  config.offload.codec = {Codec::quantization, Codec::quantization};
  const OffloadPlan plan = only_plan(config);
  EXPECT_EQ(plan.flats[0].states[0].format.exp_avg, Codec::none);
  EXPECT_LT(device_bytes_of_states(plan), 4 * all);
}

// Parameters are their own masters where they are coded: state has two bytes less.
TEST(OffloadPlan, ParametersAndGradientsAreEncodedOnTheHost) {
  TrainConfig config = large_offloaded();
  config.offload = {.device_limit = 100 * kMB,
                    .advanced = {.strategy = layout::OffloadStrategy::extreme}};
  const auto kept = [&](layout::StateCodecs codecs, config::Precision dtype) {
    config.offload.codec = codecs;
    config.train.dtype = dtype;
    return only_plan(config).on_host;
  };
  const auto all = static_cast<double>(model_of(config).parameters());
  const auto float32 = config::Precision::float32, bfloat16 = config::Precision::bfloat16;
  const auto expect = [&](const layout::KindBytes& bytes, double params, double grads,
                          double states) {
    // A tenth: embeddings have three bytes where others have two, and blocks have whole pages.
    EXPECT_NEAR(static_cast<double>(bytes.params) / all, params, 0.1 * params);
    EXPECT_NEAR(static_cast<double>(bytes.grads) / all, grads, 0.1 * grads);
    EXPECT_NEAR(static_cast<double>(bytes.states) / all, states, 0.1 * states);
  };
  expect(kept({}, float32), 4, 4, 8);
  expect(kept({.params = Codec::bf16, .grads = Codec::bf16}, float32), 3, 2, 8);
  expect(kept({}, bfloat16), 2, 2, 10);
  expect(kept({.params = Codec::bf16, .grads = Codec::bf16}, bfloat16), 3, 2, 8);
  const auto int8 = kept({.params = Codec::int8, .grads = Codec::bf16}, bfloat16);
  EXPECT_LT(static_cast<double>(int8.params) / all, 2.5);
  EXPECT_EQ(int8.states, kept({.params = Codec::bf16}, bfloat16).states);
  // What stays on the device is not encoded.
  config.offload.device_limit = 64 * 1024 * kMB;
  config.offload.param_budget = 32 * 1024 * kMB;
  EXPECT_EQ(kept({.params = Codec::int8}, bfloat16).sum(), 0);
  EXPECT_EQ(only_plan(config).flats[1].states[0].format.weight, Codec::none);
}

TEST(OffloadPlan, SlicesAreBounded) {
  TrainConfig config = large_offloaded();
  config.model.vocab = 20000;  // 10.24 million elements
  config.offload.optimizer = true;
  EXPECT_EQ(only_plan(config).flats[0].bytes.states.size(), 10u);  // of 2^20 on the CPU
  config.train.device = DeviceKind::cuda;
  EXPECT_EQ(only_plan(config).flats[0].bytes.states.size(), 1u);  // of 2^24
  config.offload.device_limit = 1024 * kMB;                       // a few have an eighth of it
  EXPECT_EQ(only_plan(config).flats[0].bytes.states.size(), 4u);
}

TEST(OffloadPlan, RanksShareLargeTensors) {
  TrainConfig config = large_offloaded();
  config.parallel.shard = ShardingStrategy::full_shard;
  int64_t params = 0, states = 0, small = 0;
  for (int rank = 0; rank < 4; ++rank) {
    const OffloadPlan plan = only_plan(config, 4, rank);
    EXPECT_EQ(plan.flats.front().sizes.name, "embed");
    EXPECT_EQ(plan.flats.front().bytes.params, 4096 * 512);
    EXPECT_EQ(plan.flats.front().bytes.line, 4 * 4096 * 512);
    const auto& rest = plan.flats.back();
    EXPECT_EQ(rest.sizes.name, "small");
    EXPECT_TRUE(rest.sizes.stays);
    small = 0;
    for (const auto& tensor : rest.sizes.tensors) small += tensor.count;
    for (const auto& flat : plan.flats) {
      if (flat.sizes.stays) continue;
      params += flat.bytes.params;
      for (const auto& slice : flat.bytes.states) states += slice.on_device;
    }
  }
  const int64_t all = model_of(config).parameters();
  EXPECT_THAT(params, about(4 * (all - small)));
  EXPECT_THAT(states, about(8 * (all - small)));
}

TEST(OffloadPlan, StagesHaveTheirLayers) {
  TrainConfig config = large_offloaded();
  config.parallel.pp = 2;
  config.train.global_batch = 4;
  EXPECT_THAT(names(only_plan(config, 2, 0)),
              ElementsAre("embed", "positions", "blocks.0", "blocks.1"));
  // A tied head is a copy, whose state is with the embedding.
  const OffloadPlan last = only_plan(config, 2, 1);
  EXPECT_THAT(names(last), ElementsAre("blocks.2", "blocks.3", "norm", "head"));
  EXPECT_EQ(last.flats[3].bytes.params, 4 * 4096 * 512);
  const int64_t block = model_of(config).parameters() - 4096 * 512 - 64 * 512 - 2 * 512;
  EXPECT_THAT(last.resting.states + last.on_host.states, about(8 * (block / 2 + 2 * 512)));
}

// Chunks of a pipeline have a part of the rank's budgets each, of those that are left open too.
TEST(OffloadPlan, ChunksShareTheBudgets) {
  TrainConfig config = large_offloaded();
  config.parallel.pp = 2;
  config.parallel.chunks = 2;
  config.parallel.schedule = layout::PipelineSchedule::interleaved;
  config.train.global_batch = 4;
  config.offload.params = config.offload.grads = config.offload.optimizer = true;
  config.validate(2);
  const auto plans = plan_offload(planned_run(config, model_of(config), 2), 0);
  ASSERT_EQ(plans.size(), 2u);
  const auto whole = layout::resolved(config.offload, 0, 0);
  EXPECT_EQ(plans[0].options.device_limit + plans[1].options.device_limit, whole.device_limit);
  EXPECT_EQ(plans[0].options.host_budget + plans[1].options.host_budget, whole.host_budget);
  EXPECT_EQ(plans[0].options.param_budget + plans[1].options.param_budget, whole.param_budget);
  EXPECT_EQ(plans[0].options.advanced.host_limit + plans[1].options.advanced.host_limit,
            whole.advanced.host_limit);
}

TEST(OffloadPlan, MemoryCountsWhatRestsOnTheDevice) {
  TrainConfig config = large_offloaded();
  const ModelSpec model = model_of(config);
  const Memory before = memory_per_rank(planned_run(config, model, 1))[0];
  config.offload = {.device_limit = 100 * kMB,
                    .advanced = {.strategy = layout::OffloadStrategy::extreme}};
  config.validate(1);
  Memory after = memory_per_rank(planned_run(config, model, 1))[0];
  EXPECT_EQ(after.parameters, 0);
  EXPECT_EQ(after.gradients, 0);
  EXPECT_EQ(after.optimizer, 0);
  EXPECT_THAT(after.on_host, about(16 * model.parameters()));
  EXPECT_EQ(after.on_disk, 0);
  EXPECT_GT(after.buffers, before.buffers);
  EXPECT_LT(after.total(), before.total());

  // Only what the switches say. The CPU, which updates the state, has a copy of the parameters.
  config.offload.params = config.offload.grads = false;
  config.offload.device_limit = 250 * kMB;
  after = memory_per_rank(planned_run(config, model, 1))[0];
  EXPECT_THAT(after.parameters, about(before.parameters));
  EXPECT_THAT(after.gradients, about(before.gradients));
  EXPECT_EQ(after.optimizer, 0);
  EXPECT_THAT(after.on_host, AllOf(Ge(12 * model.parameters()), Le(13 * model.parameters())));
  config.offload.advanced.update_site = layout::UpdateSite::device;
  after = memory_per_rank(planned_run(config, model, 1))[0];
  EXPECT_THAT(after.on_host, about(8 * model.parameters()));

  // With room, nothing moves, and there is no ring.
  config.offload.device_limit = 8192 * kMB;
  after = memory_per_rank(planned_run(config, model, 1))[0];
  EXPECT_THAT(after.parameters, about(before.parameters));
  EXPECT_THAT(after.gradients, about(before.gradients));
  EXPECT_THAT(after.optimizer, about(before.optimizer));
  EXPECT_EQ(after.buffers, before.buffers);
  EXPECT_EQ(after.on_host, 0);

  // States go to the disk where the host is full.
  config.offload = {.host_budget = 150 * kMB,
                    .device_limit = 100 * kMB,
                    .disk = "/fast",
                    .advanced = {.strategy = layout::OffloadStrategy::extreme}};
  after = memory_per_rank(planned_run(config, model, 1))[0];
  EXPECT_LE(after.on_host, 150 * kMB);
  EXPECT_GT(after.on_disk, 0);
  EXPECT_THAT(after.on_host + after.on_disk, about(16 * model.parameters()));

  config.offload.device_limit = 1 * kMB;
  config.offload.param_budget = 1 * kMB;
  EXPECT_THAT([&] { memory_per_rank(planned_run(config, model, 1)); },
              ThrowsMessage<ConfigError>(HasSubstr("offload.device_limit is 1 MB")));
}

TEST(OffloadPlan, Text) {
  TrainConfig config = large_offloaded();
  config.offload = {.device_limit = 100 * kMB,
                    .codec = {Codec::bf16, Codec::bf16},
                    .advanced = {.strategy = layout::OffloadStrategy::extreme}};
  const std::string text = plan::to_text(plan_offload(planned_run(config, model_of(config), 1), 0));
  EXPECT_THAT(text, HasSubstr("offload   parameters   gradients   optimizer       total\n"
                              "device           0 B         0 B         0 B         0 B\n"));
  EXPECT_THAT(text, HasSubstr("\ndisk             0 B"));
  EXPECT_THAT(text, says("extreme ... before ... device has"));
  EXPECT_THAT(text, says("host budget ... 32 GB ... 64 GB ... bf16"));
}

}  // namespace
}  // namespace lockstep::config
