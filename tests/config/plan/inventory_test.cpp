// SPDX-License-Identifier: Apache-2.0
#include "lockstep/config/plan/inventory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace lockstep::config {
namespace {

using testing::ElementsAre;

std::vector<std::string> names(const std::vector<InventoryKind>& kinds) {
  std::vector<std::string> names;
  for (const auto& kind : kinds) names.push_back(kind.name);
  return names;
}

TEST(Inventory, KindsOfGpt) {
  const ModelSpec model =
      ModelSpec{.layers = 12, .hidden = 8, .heads = 2, .vocab = 10}.resolved(4, 10);
  const auto tensors = model.tensors();
  const auto kinds = inventory_of(tensors, 4);
  EXPECT_THAT(names(kinds),
              ElementsAre("embed", "positions", "norms", "blocks.attention.qkv", "biases",
                          "blocks.attention.out", "blocks.mlp.up", "blocks.mlp.down"));
  int64_t count = 0, elements = 0;
  for (const auto& [name, statistics] : kinds) {
    count += statistics.count;
    elements += statistics.elements;
  }
  EXPECT_EQ(count, static_cast<int64_t>(tensors.size()));
  EXPECT_EQ(elements, model.parameters());
  EXPECT_EQ(kinds[0].statistics.elements, 80);
  EXPECT_EQ(kinds[2].statistics.count, 50);  // with their biases
  EXPECT_EQ(kinds[3].statistics.count, 12);
  EXPECT_EQ(kinds[3].statistics.max, 24 * 8);
  EXPECT_EQ(kinds[4].statistics.count, 48);
}

TEST(Inventory, KindsOfLlama) {
  ModelSpec model{.kind = ModelKind::llama, .layers = 2, .hidden = 8, .heads = 2};
  EXPECT_THAT(names(inventory_of(model.resolved(4, 10).tensors(), 4)),
              ElementsAre("embed", "norms", "blocks.attention.qkv", "blocks.attention.out",
                          "blocks.mlp.gate_up", "blocks.mlp.down", "head"));
}

TEST(Inventory, Tables) {
  const TensorSpec tensors[] = {
      {"embed.weight", {10, 8}}, {"blocks.0.mlp.up.weight", {32, 8}}, {"norm.weight", {8}}};
  EXPECT_EQ(inventory_table(tensors, 4),
            "kind           tensors  elements  mean  median  min  max    bytes\n"
            "embed                1        80    80      80   80   80    320 B\n"
            "blocks.mlp.up        1       256   256     256  256  256     1 kB\n"
            "norms                1         8     8       8    8    8     32 B\n"
            "all                  3       344   115      80    8  256  1.34 kB\n");
}

TEST(Inventory, ANameWithoutADotIsAKind) {
  const TensorSpec tensors[] = {{"scale", {4}},
                                {"bias", {4}},
                                {"final_norm", {4}},
                                {"blocks.0.scale", {4}},
                                {"blocks.weight", {4}}};
  EXPECT_THAT(names(inventory_of(tensors, 4)), ElementsAre("scale", "biases", "norms", "blocks"));
}

TrainConfig config_of(layout::ShardingStrategy shard) {
  TrainConfig config;
  config.data.path = "any";
  config.model = {.layers = 2, .hidden = 64, .heads = 4, .vocab = 100};
  config.train.seq_len = 16;
  config.train.global_batch = 32;
  config.parallel.shard = shard;
  return config;
}

std::vector<size_t> owners(const TrainConfig& config, int world, const std::string& name) {
  config.validate(world);
  const ModelSpec model = config.model.resolved(16, 100);
  const auto all = owners_of(config, model, world);
  const auto tensors = model.tensors();
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].name == name) return all[i];
  }
  ADD_FAILURE() << "no tensor " << name;
  return {};
}

TEST(Inventory, OwnersAreThoseThatHaveRows) {
  TrainConfig config = config_of(layout::ShardingStrategy::no_shard);
  EXPECT_THAT(owners(config, 4, "embed.weight"), ElementsAre(0, 1, 2, 3));
  config = config_of(layout::ShardingStrategy::full_shard);
  EXPECT_THAT(owners(config, 4, "embed.weight"), ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(owners(config, 4, "norm.weight"), ElementsAre(0, 1, 2, 3));  // too small to share
  // A block's matrices are 12288, 4096, 16384 and 16384 elements: a fourth of the line is 12288.
  EXPECT_THAT(owners(config, 4, "blocks.1.attention.qkv.weight"), ElementsAre(0));
  EXPECT_THAT(owners(config, 4, "blocks.1.attention.out.weight"), ElementsAre(1));
  EXPECT_THAT(owners(config, 4, "blocks.1.mlp.up.weight"), ElementsAre(1, 2));
  EXPECT_THAT(owners(config, 4, "blocks.1.mlp.down.weight"), ElementsAre(2, 3));
  config.parallel.shard = layout::ShardingStrategy::hybrid_shard;
  config.parallel.shard_size = 2;
  EXPECT_THAT(owners(config, 4, "blocks.1.attention.qkv.weight"), ElementsAre(0, 2));
}

TEST(Inventory, OwnersOfStagesAndMatrices) {
  TrainConfig config = config_of(layout::ShardingStrategy::no_shard);
  config.parallel.pp = 2;
  EXPECT_THAT(owners(config, 4, "embed.weight"), ElementsAre(0, 2));
  EXPECT_THAT(owners(config, 4, "blocks.1.mlp.up.weight"), ElementsAre(1, 3));
  config.parallel.order = layout::Order::tp_fastest;  // stages are slowest
  EXPECT_THAT(owners(config, 4, "embed.weight"), ElementsAre(0, 1));
  EXPECT_THAT(owners(config, 4, "blocks.1.mlp.up.weight"), ElementsAre(2, 3));
  config.parallel.order = layout::Order::pp_fastest;
  config.parallel.pp = 1;
  config.parallel.tp = 2;
  EXPECT_THAT(owners(config, 4, "blocks.1.mlp.up.weight"), ElementsAre(0, 1, 2, 3));
  config.parallel.shard = layout::ShardingStrategy::full_shard;
  EXPECT_THAT(owners(config, 4, "blocks.1.attention.qkv.weight"), ElementsAre(0, 1));
}

// Tensors with at least 1000 elements, in order: embed, positions, and four matrices of each block.
TEST(Inventory, OwnersOfWholeTensors) {
  TrainConfig config = config_of(layout::ShardingStrategy::optimizer);
  config.parallel.shard_granularity = layout::ShardGranularity::tensors;
  config.train.global_batch = 96;  // a multiple for 3 and for 4 ranks
  EXPECT_THAT(owners(config, 3, "embed.weight"), ElementsAre(0));
  EXPECT_THAT(owners(config, 3, "positions.weight"), ElementsAre(1));
  EXPECT_THAT(owners(config, 3, "blocks.0.attention.qkv.weight"), ElementsAre(2));
  EXPECT_THAT(owners(config, 3, "blocks.0.mlp.down.weight"), ElementsAre(2));
  EXPECT_THAT(owners(config, 3, "blocks.1.attention.qkv.weight"), ElementsAre(0));
  EXPECT_THAT(owners(config, 3, "norm.weight"), ElementsAre(0, 1, 2));  // too small to share
  config.parallel.shard = layout::ShardingStrategy::hybrid_shard;
  config.parallel.shard_size = 2;
  EXPECT_THAT(owners(config, 4, "blocks.0.attention.out.weight"), ElementsAre(1, 3));
  config = config_of(layout::ShardingStrategy::full_shard);
  config.parallel.shard_granularity = layout::ShardGranularity::tensors;
  config.parallel.tp = 2;
  // Ranks are dp-tp: 0 and 1 are the tensor-parallel ranks of the first data-parallel one.
  EXPECT_THAT(owners(config, 4, "blocks.0.attention.out.weight"), ElementsAre(2, 3));
  config.parallel.tp = 1;
  config.parallel.pp = 2;
  // Each stage counts by itself, after the tied embedding, which has index 0 in both.
  EXPECT_THAT(owners(config, 4, "embed.weight"), ElementsAre(0));
  EXPECT_THAT(owners(config, 4, "positions.weight"), ElementsAre(2));
  EXPECT_THAT(owners(config, 4, "blocks.1.attention.qkv.weight"), ElementsAre(3));
  config.model.tied = false;
  EXPECT_THAT(owners(config, 4, "blocks.1.attention.qkv.weight"), ElementsAre(1));
}

// They are counted, and laid out, apart from the others.
TEST(Inventory, OwnersOfFrozenTensors) {
  TrainConfig config = config_of(layout::ShardingStrategy::full_shard);
  config.train.freeze = "blocks.1.attention.*";
  // The trained matrices of the block are 16384 elements each, the frozen ones 12288 and 4096.
  EXPECT_THAT(owners(config, 4, "blocks.1.mlp.up.weight"), ElementsAre(0, 1));
  EXPECT_THAT(owners(config, 4, "blocks.1.mlp.down.weight"), ElementsAre(2, 3));
  EXPECT_THAT(owners(config, 4, "blocks.1.attention.qkv.weight"), ElementsAre(0, 1, 2));
  EXPECT_THAT(owners(config, 4, "blocks.1.attention.out.weight"), ElementsAre(3));
  config = config_of(layout::ShardingStrategy::optimizer);
  config.parallel.shard_granularity = layout::ShardGranularity::tensors;
  config.train.freeze = "positions.weight,blocks.0.mlp.*";
  // Trained: embed, qkv, out of block 0, then those of block 1.
  EXPECT_THAT(owners(config, 2, "embed.weight"), ElementsAre(0));
  EXPECT_THAT(owners(config, 2, "blocks.0.attention.qkv.weight"), ElementsAre(1));
  EXPECT_THAT(owners(config, 2, "blocks.0.attention.out.weight"), ElementsAre(0));
  EXPECT_THAT(owners(config, 2, "blocks.1.attention.qkv.weight"), ElementsAre(1));
  // Frozen, after the index that is reserved for the tied embedding.
  EXPECT_THAT(owners(config, 2, "positions.weight"), ElementsAre(1));
  EXPECT_THAT(owners(config, 2, "blocks.0.mlp.up.weight"), ElementsAre(0));
  EXPECT_THAT(owners(config, 2, "blocks.0.mlp.down.weight"), ElementsAre(1));
  EXPECT_THAT(owners(config, 2, "norm.weight"), ElementsAre(0, 1));
}

TEST(Inventory, ListHasTheOwners) {
  const TrainConfig config = config_of(layout::ShardingStrategy::full_shard);
  const std::string list = tensor_list(config, config.model.resolved(16, 100), 4);
  EXPECT_THAT(list, testing::StartsWith("tensor "));
  EXPECT_THAT(list, testing::HasSubstr("  owners\n"));
  EXPECT_THAT(list, testing::ContainsRegex("blocks.0.mlp.up.weight +.256, 64. +64 kB +1-2\n"));
}

TEST(Inventory, GroupsAreListedByTheirIds) {
  TrainConfig config = config_of(layout::ShardingStrategy::no_shard);
  EXPECT_EQ(group_list(config, 1), "");
  config.parallel.pp = 2;
  EXPECT_EQ(group_list(config, 4),
            "group             ranks\n"
            "dp_group_tp0_pp0  0, 2 \n"
            "dp_group_tp0_pp1  1, 3 \n"
            "pp_group_dp0_tp0  0, 1 \n"
            "pp_group_dp1_tp0  2, 3 \n");
}

}  // namespace
}  // namespace lockstep::config
