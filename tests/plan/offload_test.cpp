#include "lockstep/plan/offload.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lockstep/core/error.h"
#include "lockstep/plan/memory.h"
#include "lockstep/plan/report.h"

namespace lockstep::plan {
namespace {

using codec::Codec;
using config::ModelSpec;
using config::Shard;
using config::TrainConfig;
using layout::OffloadUnit;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr int64_t kMB = int64_t{1} << 20;

TrainConfig large() {
  TrainConfig config;
  config.data.path = "any";
  config.model = {.layers = 4, .hidden = 512, .heads = 8, .vocab = 4096};
  config.train.seq_len = 64;
  config.train.micro_batch = 1;
  config.train.device = config::DeviceKind::cpu;
  return config;
}

ModelSpec model_of(const TrainConfig& config) {
  return config.model.resolved(config.train.seq_len, 256);
}

std::vector<OffloadUnit> units_of(const TrainConfig& config, int world = 1, int rank = 0) {
  config.validate(world);
  return offload_units(config, model_of(config), world, rank);
}

std::vector<std::string> names(const std::vector<OffloadUnit>& units) {
  std::vector<std::string> names;
  for (const auto& unit : units) names.push_back(unit.name);
  return names;
}

struct Sums {
  int64_t params = 0, grads = 0, on_device = 0, on_host = 0;
};
Sums sums_of(const std::vector<OffloadUnit>& units) {
  Sums sums;
  for (const auto& unit : units) {
    sums.params += unit.params;
    sums.grads += unit.grads;
    for (const auto& slice : unit.states) {
      sums.on_device += slice.on_device;
      sums.on_host += slice.on_host;
    }
  }
  return sums;
}

TEST(OffloadPlan, UnitsAreLayers) {
  TrainConfig config = large();
  const auto units = units_of(config);
  EXPECT_THAT(names(units), ElementsAre("embed", "positions", "blocks.0", "blocks.1", "blocks.2",
                                        "blocks.3", "norm"));
  const int64_t all = model_of(config).parameters();
  const Sums sums = sums_of(units);
  EXPECT_EQ(sums.params, 4 * all);
  EXPECT_EQ(sums.grads, 4 * all);
  EXPECT_EQ(sums.on_device, 8 * all);
  EXPECT_EQ(sums.on_host, 8 * all);
  EXPECT_EQ(units[0].params, 4 * 4096 * 512);
  EXPECT_EQ(units[0].line, 0);
  EXPECT_EQ(units[2].params, units[5].params);
  config.model.tied = false;
  EXPECT_EQ(names(units_of(config)).back(), "head");
}

TEST(OffloadPlan, StateOfSixteenBitParametersHasARemainder) {
  TrainConfig config = large();
  config.train.dtype = config::Precision::bfloat16;
  const int64_t all = model_of(config).parameters();
  const Sums sums = sums_of(units_of(config));
  EXPECT_EQ(sums.params, 2 * all);
  EXPECT_EQ(sums.on_device, 10 * all);
}

TEST(OffloadPlan, StateIsEncodedOnTheHost) {
  TrainConfig config = large();
  config.offload.optimizer = true;
  config.offload.codec = {Codec::bf16, Codec::none};
  const int64_t all = model_of(config).parameters();
  EXPECT_EQ(sums_of(units_of(config)).on_host, 6 * all);
  EXPECT_EQ(sums_of(units_of(config)).on_device, 8 * all);
}

TEST(OffloadPlan, SlicesAreBounded) {
  TrainConfig config = large();
  config.model.vocab = 20000;  // 10.24 million elements
  const auto units = units_of(config);
  ASSERT_EQ(units[0].states.size(), 3u);
  EXPECT_EQ(units[0].states[0].on_device, 8 << 22);
  EXPECT_EQ(units[0].states[2].on_device, 8 * (20000 * 512 - (2 << 22)));
}

TEST(OffloadPlan, RanksShareLargeTensors) {
  TrainConfig config = large();
  config.parallel.shard = Shard::full;
  Sums sums;
  for (int rank = 0; rank < 4; ++rank) {
    const auto units = units_of(config, 4, rank);
    EXPECT_EQ(units[0].name, "small");
    EXPECT_EQ(units[1].name, "embed");
    EXPECT_EQ(units[1].params, 4096 * 512);
    EXPECT_EQ(units[1].line, 4 * 4096 * 512);
    const Sums of_rank = sums_of(units);
    sums.params += of_rank.params - units[0].params;
    sums.on_device += of_rank.on_device - units[0].states[0].on_device;
  }
  const auto units = units_of(config, 4, 0);
  const int64_t small = units[0].params / 4, all = model_of(config).parameters();
  EXPECT_EQ(sums.on_device, 8 * (all - small));
  EXPECT_GE(sums.params, 4 * (all - small));
  EXPECT_LT(sums.params, 4 * (all - small) * 101 / 100);  // lines are aligned
}

TEST(OffloadPlan, StagesHaveTheirLayers) {
  TrainConfig config = large();
  config.parallel.pp = 2;
  config.train.global_batch = 4;
  EXPECT_THAT(names(units_of(config, 2, 0)),
              ElementsAre("embed", "positions", "blocks.0", "blocks.1"));
  // A tied head is a copy, whose state is with the embedding.
  const auto last = units_of(config, 2, 1);
  EXPECT_THAT(names(last), ElementsAre("blocks.2", "blocks.3", "norm", "head"));
  EXPECT_TRUE(last[3].states.empty());
  EXPECT_EQ(last[3].params, 4 * 4096 * 512);
}

TEST(OffloadPlan, MemoryCountsWhatRestsOnTheDevice) {
  TrainConfig config = large();
  const ModelSpec model = model_of(config);
  const Memory before = memory_per_rank(config, model, 1)[0];
  config.offload = {.device_limit = 100 * kMB, .strategy = layout::OffloadStrategy::extreme};
  config.validate(1);
  Memory after = memory_per_rank(config, model, 1)[0];
  EXPECT_EQ(after.parameters, 0);
  EXPECT_EQ(after.gradients, 0);
  EXPECT_EQ(after.optimizer, 0);
  EXPECT_EQ(after.on_host, 16 * model.parameters());
  EXPECT_EQ(after.on_disk, 0);
  EXPECT_GT(after.buffers, before.buffers);
  EXPECT_LT(after.total(), before.total());

  // Only what the switches say.
  config.offload.params = config.offload.grads = false;
  config.offload.device_limit = 250 * kMB;
  after = memory_per_rank(config, model, 1)[0];
  EXPECT_EQ(after.parameters, before.parameters);
  EXPECT_EQ(after.gradients, before.gradients);
  EXPECT_EQ(after.activations, before.activations);
  EXPECT_EQ(after.optimizer, 0);
  EXPECT_EQ(after.on_host, 8 * model.parameters());

  // With room, nothing moves.
  config.offload.device_limit = 8192 * kMB;
  after = memory_per_rank(config, model, 1)[0];
  EXPECT_EQ(after, before);

  // States go to the disk where the host is full.
  config.offload = {.host_budget = 150 * kMB,
                    .device_limit = 100 * kMB,
                    .strategy = layout::OffloadStrategy::extreme,
                    .disk = "/fast"};
  after = memory_per_rank(config, model, 1)[0];
  EXPECT_LE(after.on_host, 150 * kMB);
  EXPECT_GT(after.on_disk, 0);
  EXPECT_EQ(after.on_host + after.on_disk, 16 * model.parameters());

  config.offload.device_limit = 1 * kMB;
  config.offload.param_budget = 1 * kMB;
  EXPECT_THAT([&] { memory_per_rank(config, model, 1); },
              ThrowsMessage<ConfigError>(HasSubstr("offload.device_limit is 1 MB")));
}

TEST(OffloadPlan, LineOfTheRankWithMost) {
  std::vector<Memory> ranks{{.on_host = 512, .on_disk = 1}, {.on_host = 512, .on_disk = 1}};
  EXPECT_EQ(offload_line(ranks), "offload: 512 B on the host, 1 B on the disk");
  ranks[1].on_disk = 3;
  EXPECT_EQ(offload_line(ranks), "offload: 512 B on the host, 3 B on the disk (rank 1, the most)");
}

TEST(OffloadPlan, Text) {
  TrainConfig config = large();
  config.offload = {.device_limit = 100 * kMB,
                    .codec = {Codec::bf16, Codec::bf16},
                    .strategy = layout::OffloadStrategy::extreme};
  const std::string text = to_text(plan_offload(config, model_of(config), 1, 0));
  EXPECT_THAT(text, HasSubstr("offload   parameters   gradients   optimizer       total\n"
                              "device           0 B         0 B         0 B         0 B\n"));
  EXPECT_THAT(text, HasSubstr("\ndisk             0 B"));
  EXPECT_THAT(text, HasSubstr("extreme: the device has "));
  EXPECT_THAT(text, HasSubstr("the host budget is 32 GB, which holds 64 GB of state as bf16\n"));
}

}  // namespace
}  // namespace lockstep::plan
