// SPDX-License-Identifier: Apache-2.0
// Sharded training with processes as ranks, on the backend that LOCKSTEP_TEST_BACKEND names.
#include <gtest/gtest.h>
#include <torch/utils.h>

#include "tests/parallel/process_world.h"
#include "tests/parallel/shard/support.h"
#include "tests/parallel/shard/training.h"

namespace lockstep::test {
namespace {

using parallel::FullyShardOptions;

constexpr int kSteps = 8;

mesh::Mesh mesh_for(Strategy strategy) {
  const int inner = world().size() % 2 == 0 ? 2 : 1;
  if (strategy != Strategy::hybrid_shard) return mesh::Mesh::linear(world(), "dp");
  return {world(), {{"replicate", world().size() / inner}, {"shard", inner}}};
}

const std::vector<Strategy> kAll{Strategy::full_shard, Strategy::shard_grad_op, Strategy::optimizer,
                                 Strategy::no_shard, Strategy::hybrid_shard};

ShardCurve train(const FullyShardOptions& options, Optimizer kind) {
  return train_sharded<TransformerTask>(mesh_for(options.strategy), micro_batches(), kind, options,
                                        kSteps);
}

void expect_same(const ShardCurve& actual, const ShardCurve& expected, double within) {
  for (size_t i = 0; i < expected.losses.size(); ++i) {
    EXPECT_NEAR(actual.losses[i], expected.losses[i], 1e-5 * expected.losses[i]) << "step " << i;
    EXPECT_NEAR(actual.norms[i], expected.norms[i], 1e-5 * expected.norms[i]) << "step " << i;
  }
  ASSERT_EQ(actual.weights.size(), expected.weights.size());
  for (size_t i = 0; i < expected.weights.size(); ++i)
    EXPECT_LT(distance(actual.weights[i], expected.weights[i]), within) << "parameter " << i;
}

TEST(ShardProcesses, FollowOneProcess) {
  const ShardCurve expected = train_whole<TransformerTask>(micro_batches(), Optimizer::sgd, kSteps);
  for (const Strategy strategy : kAll) {
    SCOPED_TRACE(name_of(strategy));
    expect_same(train({.strategy = strategy, .min_num_params = 100}, Optimizer::sgd), expected,
                1e-6);
  }
}

TEST(ShardProcesses, WithOptions) {
  const ShardCurve expected = train_whole<TransformerTask>(micro_batches(), Optimizer::sgd, kSteps);
  const std::vector<FullyShardOptions> several{
      {.units = parallel::BySize{1},
       .min_num_params = 1,
       .use_orig_params = true,
       .advanced = {.forward_prefetch = parallel::Prefetch::post,
                    .backward_prefetch = parallel::Prefetch::post,
                    .prefetch_depth = 2}},
      {.units = parallel::ByType{{"TransformerBlock"}},
       .offload = parallel::HostOffload{},
       .no_sync = parallel::NoSyncGradients::sharded,
       .advanced = {.forward_prefetch = parallel::Prefetch::none,
                    .backward_prefetch = parallel::Prefetch::none,
                    .keep_gathered_on_host = true}},
      {.units = parallel::OneUnit{}, .advanced = {.limit_all_gathers = false}}};
  for (const FullyShardOptions& options : several)
    expect_same(train(options, Optimizer::sgd), expected, 1e-6);
}

TEST(ShardProcesses, ReproducibleGivesTheBitsOfOneProcess) {
  if (world().size() == 3) return;  // the promise is about powers of two
  const FullyShardOptions one{.min_num_params = 100, .reproducible = true};
  const ShardCurve alone = train_sharded<TransformerTask>(
      mesh::Mesh::linear(comm::Group(), "dp"), micro_batches(), Optimizer::adamw, one, kSteps);
  for (const Strategy strategy : kAll) {
    SCOPED_TRACE(name_of(strategy));
    const ShardCurve curve = train(
        {.strategy = strategy, .min_num_params = 100, .reproducible = true}, Optimizer::adamw);
    EXPECT_EQ(curve.norms, alone.norms);
    for (size_t i = 0; i < alone.weights.size(); ++i)
      EXPECT_TRUE(at::equal(curve.weights[i], alone.weights[i])) << "parameter " << i;
  }
}

TEST(ShardProcesses, Nested) {
  const FullyShardOptions rest{.units = parallel::OneUnit{}, .min_num_params = 100};
  const auto train_nested = [&](const ShardInside& inside) {
    return train_sharded<TransformerTask>(mesh_for(Strategy::full_shard), micro_batches(),
                                          Optimizer::sgd, rest, kSteps, inside);
  };
  const ShardCurve curve = train_nested([&](torch::nn::Module& model) {
    const auto modules = model.named_modules();
    parallel::fully_shard(*modules["tokens"], world(),
                          {.strategy = Strategy::optimizer, .min_num_params = 100});
    parallel::fully_shard(*modules["block0"], world(), rest);
    parallel::fully_shard(*modules["block1"], world(), rest);
  });
  expect_same(curve, train_whole<TransformerTask>(micro_batches(), Optimizer::sgd, kSteps), 1e-6);
}

TEST(ShardProcesses, StatesAndSummon) {
  Layers model = LayersTask::make(static_cast<uint64_t>(1 + world().rank()));
  Layers plain = LayersTask::make(1);
  auto sharded = parallel::fully_shard(*model, world(), weights_only());
  {
    const auto guard = sharded.summon({.write_back = true});
    const at::NoGradGuard no_grad;
    EXPECT_TRUE(at::equal(model->layers[3]->weight, plain->layers[3]->weight));
    model->layers[2]->weight.fill_(2);
  }
  const auto values = by_name(sharded.full_state_dict());
  EXPECT_TRUE(values.at("layer2.weight").eq(2).all().item<bool>());
  EXPECT_TRUE(at::equal(values.at("layer1.weight"), plain->layers[1]->weight));
  std::vector<optim::NamedTensor> loaded;
  for (const auto& item : plain->named_parameters()) loaded.push_back({item.key(), item.value()});
  sharded.load_full_state_dict(loaded);
  const at::NoGradGuard no_grad;
  EXPECT_TRUE(at::equal(model->layers[2]->weight, plain->layers[2]->weight));
}

}  // namespace
}  // namespace lockstep::test
