// SPDX-License-Identifier: Apache-2.0
#include "lockstep/config/float8.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>

#include "lockstep/config/plan/planned_run.h"
#include "lockstep/config/plan/timed_run.h"
#include "lockstep/core/error.h"
#include "lockstep/plan/cluster.h"
#include "tests/support/says.h"

namespace lockstep::config::float8_test {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

// Llama: qkv 96 x 64, out 64 x 64, gate_up 96 x 64, down 64 x 48.
TrainConfig config() {
  TrainConfig config;
  config.model = {.kind = ModelKind::llama, .layers = 2, .hidden = 64, .heads = 4};
  config.model.kv_heads = 1;
  config.model.ffn = 48;
  config.train.precision = Precision::fp8;
  config.train.fp8_min = 0;
  return config;
}

std::set<std::string> layers(const TrainConfig& config) {
  return float8_layers(config, config.model);
}

std::string refusal(const TrainConfig& config) {
  try {
    layers(config);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

TEST(Float8Layers, AreThoseThatAreLargeEnough) {
  TrainConfig run = config();
  EXPECT_THAT(layers(run),
              ElementsAre("attention.out", "attention.qkv", "mlp.down", "mlp.gate_up"));
  run.train.fp8_min = 49;
  EXPECT_THAT(layers(run), ElementsAre("attention.out", "attention.qkv", "mlp.gate_up"));
  run.train.fp8_min.reset();
  run.model.hidden = 512;
  run.model.ffn = 500;  // gate_up is 1000 x 512, no multiple of 16
  EXPECT_THAT(layers(run), ElementsAre("attention.out", "attention.qkv"));
  run.train.precision.reset();
  EXPECT_THAT(layers(run), IsEmpty());
  run.model.kind = ModelKind::gpt;
  run.model.kv_heads = 0;
  run.train.precision = Precision::fp8;
  run.train.fp8_min = 0;
  run.model.ffn = 512;
  EXPECT_THAT(layers(run), ElementsAre("attention.out", "attention.qkv", "mlp.down", "mlp.up"));
}

TEST(Float8Layers, WhatCannotBe) {
  using test::says;
  TrainConfig run = config();
  run.parallel.tp = 2;
  EXPECT_THAT(refusal(run), says("mlp.down ... 64 x 48 ... 64 x 24 ... parallel.tp 2 ... 16"));
  run = config();
  run.model.ffn = 40;
  EXPECT_THAT(refusal(run), says("train.fp8_min is 0 ... mlp.down ... 64 x 40 ... 16"));
  run.train.fp8_min = 1;
  EXPECT_EQ(refusal(run), "");
  run.train.fp8_min.reset();
  EXPECT_THAT(refusal(run), says("model.hidden 64 ... train.fp8_min 512"));
  run.train.precision = Precision::bfloat16;
  EXPECT_EQ(refusal(run), "");
  run.train.fp8_min = 0;
  EXPECT_THAT(refusal(run), says("train.fp8_min is 0 ... train.precision"));
  run.train.fp8_min.reset();
  run.train.dtype = Precision::float32;
  EXPECT_THAT(refusal(run), says("train.precision is bfloat16 ... train.dtype is float32"));
}

TEST(Float8Layers, TypesOfWeights) {
  const auto type = [](std::optional<Precision> precision, std::optional<Precision> dtype) {
    RunConfig run;
    run.precision = precision;
    run.dtype = dtype;
    return run.type();
  };
  EXPECT_EQ(type({}, {}), Precision::float32);
  EXPECT_EQ(type({}, Precision::bfloat16), Precision::bfloat16);
  EXPECT_EQ(type(Precision::bfloat16, {}), Precision::bfloat16);
  EXPECT_EQ(type(Precision::fp8, {}), Precision::bfloat16);
  EXPECT_EQ(type(Precision::fp8, Precision::float32), Precision::float32);
}

// Of what a block keeps, inputs of linear layers are codes of a byte. That of attention's output
// layer is kept by fused attention too, which libtorch 1 does not have.
TEST(Float8Layers, PlansKnowThem) {
  TrainConfig run = config();
  run.model.layers = 8;
  run.model.hidden = 2048;
  run.model.heads = 16;
  run.model.kv_heads = 4;
  run.model.ffn = 5632;
  run.model = run.model.resolved(1024, 32000);
  run.train.device = DeviceKind::cuda;
  run.train.seq_len = 1024;
  TrainConfig wide = run;
  wide.train.precision = Precision::bfloat16;
  wide.train.fp8_min.reset();
  const auto kept = [](const TrainConfig& each) {
    return cost_of(LayerType::block, each, each.model).kept;
  };
  const int64_t tokens = run.train.micro_batch * run.train.seq_len;
  const int64_t others = 2 * 2048 + 5632;
  EXPECT_THAT(kept(wide) - kept(run),
              testing::AnyOf(tokens * (others - 2048), tokens * (others + 2048)));
  const auto cluster = plan::typical_cluster("h200");
  const Prediction fast = predict(run, run.model, 1, cluster),
                   slow = predict(wide, wide.model, 1, cluster);
  EXPECT_LT(fast.time.total(), 0.95 * slow.time.total());
  EXPECT_GT(fast.time.total(), 0.6 * slow.time.total());
}

}  // namespace
}  // namespace lockstep::config::float8_test
