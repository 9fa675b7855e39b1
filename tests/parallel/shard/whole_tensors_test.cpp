// SPDX-License-Identifier: Apache-2.0
// Ranks that share whole tensors: ShardGranularity::tensors.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <memory>
#include <mutex>
#include <set>

#include "lockstep/optim/adamw.h"
#include "lockstep/optim/parameters/parameters.h"
#include "lockstep/parallel/offload/offload.h"
#include "tests/parallel/shard/support.h"
#include "tests/support/says.h"

namespace lockstep::test {
namespace {

using parallel::fully_shard;
using parallel::FullyShardOptions;
using parallel::ShardGranularity;
using parallel::ShardInfo;
using testing::ElementsAre;
using testing::HasSubstr;

FullyShardOptions whole_tensors(Strategy strategy = Strategy::optimizer) {
  return {.strategy = strategy,
          .units = parallel::BySize{1},
          .min_num_params = 100,
          .use_orig_params = true,
          .advanced = {.granularity = ShardGranularity::tensors}};
}

// The rank that has each weight of the layers, as shard_info() of every rank says.
std::vector<int> owners_of_weights(int ranks, const FullyShardOptions& options,
                                   const std::function<void(Layers&)>& prepare = nullptr) {
  std::mutex mutex;
  std::vector<int> owners(5, -1);
  comm::run_threads(ranks, [&](const comm::Group& group) {
    Layers model(5);
    if (prepare) prepare(model);
    const auto sharded = fully_shard(*model, group, options);
    for (size_t i = 0; i < owners.size(); ++i) {
      const ShardInfo info = sharded.shard_info("layer" + std::to_string(i) + ".weight");
      EXPECT_EQ(info.rank, group.rank());
      EXPECT_EQ(info.start, 0);
      EXPECT_EQ(info.size, info.is_local ? 32 * 32 : 0);
      if (!info.is_local) continue;
      const std::lock_guard lock(mutex);
      EXPECT_EQ(owners[i], -1) << "two owners";
      owners[i] = group.rank();
    }
  });
  return owners;
}

TEST(WholeTensors, AreDealtOutOverTheModel) {
  // Each weight is a unit; the biases, which stay whole, take no turn.
  for (const Strategy strategy : {Strategy::optimizer, Strategy::full_shard})
    EXPECT_THAT(owners_of_weights(3, whole_tensors(strategy)), ElementsAre(0, 1, 2, 0, 1));
  FullyShardOptions options = whole_tensors();
  options.units = parallel::OneUnit{};
  EXPECT_THAT(owners_of_weights(2, options), ElementsAre(0, 1, 0, 1, 0));
  options.min_num_params = 1;  // weight, bias, weight, bias ...
  EXPECT_THAT(owners_of_weights(3, options), ElementsAre(0, 2, 1, 0, 2));
  EXPECT_THAT(owners_of_weights(8, whole_tensors()), ElementsAre(0, 1, 2, 3, 4));
  options = whole_tensors();
  options.advanced.first_tensors = {"layer2.weight", "elsewhere", "layer0.weight"};
  EXPECT_THAT(owners_of_weights(4, options), ElementsAre(2, 3, 0, 0, 1));
}

TEST(WholeTensors, FrozenOnesAreCountedByThemselves) {
  const auto freeze = [](Layers& model) {
    for (const size_t i : {size_t{0}, size_t{2}, size_t{4}})
      model->layers[i]->weight.set_requires_grad(false);
  };
  EXPECT_THAT(owners_of_weights(2, whole_tensors(), freeze), ElementsAre(0, 0, 1, 1, 0));
}

TEST(WholeTensors, TheOptimizerSeesMatrices) {
  comm::run_threads(3, [](const comm::Group& group) {
    Layers model = LayersTask::make(1);
    const auto sharded = fully_shard(*model, group, whole_tensors());
    std::vector<std::string> matrices;
    for (const auto& [name, tensor, parts] : sharded.named_parameters()) {
      if (tensor.dim() != 2) continue;
      EXPECT_THAT(tensor.sizes(), ElementsAre(32, 32));
      matrices.push_back(name);
    }
    const std::string mine = "layer" + std::to_string(group.rank()) + ".weight";
    if (group.rank() == 0) {
      EXPECT_THAT(matrices, ElementsAre(mine, "layer3.weight"));
    } else {
      EXPECT_THAT(matrices, ElementsAre(mine));
    }
    const double owned = group.rank() == 0 ? 2 * 1024 : 1024;
    EXPECT_DOUBLE_EQ(sharded.stats().local_ratio, (owned + 4 * 32) / (4 * 1024 + 4 * 32));
    // Views of the whole, with their own shapes.
    const layout::ModelParameters parameters = optim::model_parameters(*model);
    EXPECT_EQ(parameters.size(), 8u);
    EXPECT_THAT(parameters.shape("layer3.weight"), ElementsAre(32, 32));
    EXPECT_EQ(parameters.describe(),
              "8 tensors, 4224 elements (mean 528, median 528, min 32, max 1024), 16.5 kB");
  });
}

// Weights after some steps of AdamW, on every rank the same.
struct Run {
  int ranks = 1;
  int64_t layers = 4;
  bool freeze = false;  // the first weight
};
std::vector<at::Tensor> trained(const Run& run, const FullyShardOptions& options) {
  constexpr int kBatches = 4, kSteps = 3;
  std::vector<at::Tensor> weights;
  comm::run_threads(run.ranks, [&](const comm::Group& group) {
    Layers model(run.layers);
    fill_parameters(*model, 3);
    if (run.freeze) model->layers[0]->weight.set_requires_grad(false);
    auto sharded = fully_shard(*model, group, options);
    const optim::AdamWOptions how{.lr = 0.05, .weight_decay = 0.1};
    std::unique_ptr<optim::Optimizer> optimizer;
    if (std::holds_alternative<layout::OffloadOptions>(options.offload)) {
      optimizer = std::make_unique<parallel::OffloadedAdamW>(sharded, how);
    } else {
      optimizer = std::make_unique<optim::AdamW>(sharded.named_parameters(), how);
    }
    const int mine = kBatches / group.size();
    for (int step = 0; step < kSteps; ++step) {
      for (int i = 0; i < mine; ++i) {
        std::optional<parallel::NoSyncShards> no_sync;
        if (i + 1 < mine) no_sync.emplace(sharded.no_sync());
        const Batch batch = LayersTask::batch(step * kBatches + group.rank() * mine + i);
        (LayersTask::loss(model->forward(batch.input).to(at::kFloat), batch) / mine).backward();
      }
      sharded.clip_grad_norm_(0.05);
      optimizer->step();
      optimizer->zero_grad();
    }
    const auto all = sharded.full_state_dict();
    if (group.rank() != 0) return;
    for (const auto& [name, tensor] : all) weights.push_back(tensor);
  });
  return weights;
}

void expect_bits(const std::vector<at::Tensor>& found, const std::vector<at::Tensor>& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < found.size(); ++i)
    EXPECT_TRUE(torch::equal(found[i], expected[i])) << "parameter " << i;
}

// Rows, whole tensors and one process, to the last bit.
void expect_as_rows(const Run& run, FullyShardOptions options) {
  options.reproducible = true;
  const auto found = trained(run, options);
  FullyShardOptions rows = options;
  rows.advanced.granularity = ShardGranularity::rows;
  expect_bits(found, trained(run, rows));
  rows.advanced.hybrid_group_size = 0;
  rows.strategy = Strategy::full_shard;
  expect_bits(found, trained({1, run.layers, run.freeze}, rows));
}

TEST(WholeTensors, TrainToTheBitsOfRowsAndOfOneProcess) {
  for (const Strategy strategy : {Strategy::optimizer, Strategy::full_shard,
                                  Strategy::shard_grad_op, Strategy::hybrid_shard}) {
    for (const bool orig : {false, true}) {
      SCOPED_TRACE(std::string(name_of(strategy)) + (orig ? " orig" : " flat"));
      FullyShardOptions options = whole_tensors(strategy);
      options.use_orig_params = orig;
      options.units = orig ? parallel::UnitPolicy(parallel::BySize{1}) : parallel::OneUnit{};
      if (strategy == Strategy::hybrid_shard) options.advanced.hybrid_group_size = 2;
      expect_as_rows({.ranks = 4}, options);
    }
  }
}

TEST(WholeTensors, UnevenSharesTrainToTheSameBits) {
  FullyShardOptions options = whole_tensors();
  options.min_num_params = 1;
  for (const bool orig : {false, true}) {
    SCOPED_TRACE(orig);
    options.use_orig_params = orig;
    expect_as_rows({.ranks = 4, .layers = 1}, options);  // two tensors, one of them large
    options.min_num_params = 100;
    expect_as_rows({.ranks = 4, .layers = 1}, options);  // one, and a whole bias
    expect_as_rows({.ranks = 2, .layers = 3, .freeze = true}, options);
  }
  options.strategy = Strategy::full_shard;
  expect_as_rows({.ranks = 4, .layers = 1}, options);
}

TEST(WholeTensors, MixedPrecisionAndOffloadTrainAsRowsDo) {
  const auto compare = [](FullyShardOptions options) {
    options.reproducible = true;
    const auto found = trained({.ranks = 2}, options);
    options.advanced.granularity = ShardGranularity::rows;
    expect_bits(found, trained({.ranks = 2}, options));
  };
  FullyShardOptions options = whole_tensors();
  options.mixed_precision = {.param = at::kDouble, .reduce = at::kDouble};
  compare(options);
  options = whole_tensors(Strategy::full_shard);
  options.offload = parallel::HostOffload{};
  compare(options);
  // What is encoded is encoded element by element.
  for (const codec::Codec params : {codec::Codec::none, codec::Codec::bf16}) {
    for (const bool orig : {false, true}) {
      options.use_orig_params = orig;
      options.offload =
          layout::OffloadOptions{.device_limit = 64 << 20,
                                 .codec = {.params = params},
                                 .advanced = {.strategy = layout::OffloadStrategy::extreme,
                                              .update_site = layout::UpdateSite::cpu}};
      compare(options);
    }
  }
}

// Values are written to, and read from, the right places of the line.
TEST(WholeTensors, ValuesAreWhereTheyShouldBe) {
  for (const Strategy strategy : {Strategy::optimizer, Strategy::full_shard}) {
    SCOPED_TRACE(name_of(strategy));
    comm::run_threads(3, [&](const comm::Group& group) {
      Layers model(5), plain(5);
      fill_parameters(*plain, 9);
      FullyShardOptions options = whole_tensors(strategy);
      options.units = parallel::OneUnit{};
      options.use_orig_params = false;
      auto sharded = fully_shard(*model, group, options);
      std::vector<optim::NamedTensor> values;
      for (const auto& item : plain->named_parameters())
        values.push_back({item.key(), item.value().detach()});
      sharded.load_full_state_dict(values);
      const auto whole = by_name(sharded.full_state_dict());
      for (const auto& [name, tensor] : values) EXPECT_TRUE(torch::equal(whole.at(name), tensor));
      {
        const auto guard = sharded.summon({.write_back = true});
        for (const auto& [name, tensor] : values)
          EXPECT_TRUE(torch::equal(model->named_parameters()[name], tensor)) << name;
        const torch::NoGradGuard no_grad;
        model->layers[3]->weight.fill_(7);
      }
      EXPECT_EQ(by_name(sharded.full_state_dict()).at("layer3.weight").min().item<double>(), 7);
      EXPECT_TRUE(torch::equal(by_name(sharded.full_state_dict()).at("layer2.weight"),
                               plain->layers[2]->weight));
      std::set<std::string> held;
      for (const auto& [placement, tensor] : sharded.sharded_state_dict()) {
        if (placement.name.ends_with("weight") && !placement.is_empty())
          held.insert(placement.name);
        EXPECT_TRUE(placement.is_empty() || placement.is_whole()) << placement.describe();
      }
      EXPECT_EQ(held.size(), group.rank() < 2 ? 2u : 1u);
      // Messages name the right parameter, though the line is not in the model's order.
      const torch::NoGradGuard no_grad;
      const auto guard = sharded.summon();
      for (const size_t i : {size_t{1}, size_t{3}}) {
        EXPECT_THAT(error_of([&] { model->layers[i]->weight.zero_(); }),
                    HasSubstr("layer" + std::to_string(i) + ".weight"));
      }
    });
  }
}

TEST(ModelParameters, OfAModule) {
  const auto module = std::make_shared<torch::nn::Module>("module");
  const at::Tensor shared = module->register_parameter("first", torch::zeros({4, 6}));
  module->register_parameter("again", shared);
  module->register_parameter("frozen", torch::zeros({5}, at::kDouble), /*requires_grad=*/false);
  module->register_parameter("none", {}, /*requires_grad=*/false);
  module->register_buffer("buffer", torch::zeros({7}));
  const layout::ModelParameters parameters = optim::model_parameters(*module);
  EXPECT_EQ(parameters, layout::ModelParameters().add("first", {4, 6}, 4).add("frozen", {5}, 8));
}

TEST(WholeTensors, AreRefusedWhereNothingIsShared) {
  comm::run_threads(2, [](const comm::Group& group) {
    Layers model(1);
    EXPECT_THAT(error_of([&] { fully_shard(*model, group, whole_tensors(Strategy::no_shard)); }),
                says("granularity is tensors ... strategy is none"));
    FullyShardOptions rows = weights_only();
    rows.advanced.first_tensors = {"layer0.weight"};
    EXPECT_THAT(error_of([&] { fully_shard(*model, group, rows); }),
                HasSubstr("first_tensors has 1 names, but advanced.granularity is rows"));
  });
}

}  // namespace
}  // namespace lockstep::test
