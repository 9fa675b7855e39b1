// SPDX-License-Identifier: Apache-2.0
// What the options of fully_shard do: where things are, layouts of ranks, what optimizers see.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <memory>
#include <mutex>
#include <numeric>

#include "lockstep/optim/adamw.h"
#include "lockstep/optim/sgd.h"
#include "tests/parallel/shard/follow.h"

namespace lockstep::test {
namespace {

using parallel::fully_shard;
using parallel::FullyShardOptions;
using testing::ElementsAre;
using testing::HasSubstr;
using Names = std::vector<std::string>;

// ---- where things are ----

TEST(ShardInfo, TilesEveryParameter) {
  for (const int ranks : {2, 3, 4, 8}) {
    std::mutex mutex;
    std::map<std::string, std::vector<parallel::ShardInfo>> infos;
    comm::run_threads(ranks, [&](const comm::Group& group) {
      TinyTransformer model = TransformerTask::make(1);
      const auto sharded = fully_shard(*model, group, {.min_num_params = 1});
      const std::lock_guard lock(mutex);
      for (const auto& item : model->named_parameters()) {
        auto& all = infos[item.key()];
        all.resize(static_cast<size_t>(ranks));
        all[static_cast<size_t>(group.rank())] = sharded.shard_info(item.key());
        EXPECT_EQ(all[static_cast<size_t>(group.rank())].rank, group.rank());
        EXPECT_EQ(at::IntArrayRef(all[static_cast<size_t>(group.rank())].original_shape),
                  item.value().sizes());
      }
    });
    for (const auto& [name, all] : infos) {
      int64_t next = 0;
      const auto& shape = all[0].original_shape;
      for (const parallel::ShardInfo& info : all) {
        EXPECT_EQ(info.is_local, info.size > 0);
        if (info.size == 0) continue;
        EXPECT_EQ(info.start, next) << name;
        EXPECT_EQ(info.start % (layout::numel_of(shape) / shape[0]), 0) << "rows of " << name;
        next += info.size;
      }
      EXPECT_EQ(next, layout::numel_of(shape)) << name;
    }
  }
}

TEST(ShardInfo, TenOverFour) {
  std::mutex mutex;
  std::vector<int64_t> sizes(4), starts(4);
  comm::run_threads(4, [&](const comm::Group& group) {
    auto model = std::make_shared<torch::nn::Module>();
    model->register_parameter("vector", at::arange(10, at::kFloat));
    const auto sharded = fully_shard(*model, group, {.min_num_params = 1});
    const auto info = sharded.shard_info("vector");
    const std::lock_guard lock(mutex);
    sizes[static_cast<size_t>(group.rank())] = info.size;
    starts[static_cast<size_t>(group.rank())] = info.start;
  });
  EXPECT_THAT(sizes, ElementsAre(3, 3, 2, 2));
  EXPECT_THAT(starts, ElementsAre(0, 3, 6, 8));
}

TEST(ShardInfo, WrongNames) {
  comm::run_threads(2, [](const comm::Group& group) {
    Layers model;
    const auto sharded = fully_shard(*model, group, weights_only());
    EXPECT_THAT(error_of([&] { sharded.shard_info("layer9.weight"); }),
                HasSubstr("no parameter 'layer9.weight'"));
    EXPECT_THAT(error_of([&] { sharded.shard_info("layer1.bias"); }),
                HasSubstr("'layer1.bias' is not sharded"));
    EXPECT_THAT(error_of([&] { sharded.state("bias"); }), HasSubstr("no parameter 'bias'"));
    EXPECT_EQ(sharded.state("layer1.bias"), parallel::ParameterState::gathered);
  });
  Layers alone;
  const auto sharded = fully_shard(*alone, comm::Group(), weights_only());
  EXPECT_THAT(error_of([&] { sharded.shard_info("layer1.weight"); }), HasSubstr("is not sharded"));
  EXPECT_THAT(error_of([&] { sharded.state("nothing"); }), HasSubstr("no parameter 'nothing'"));
}

TEST(Stats, SizesAndRatios) {
  std::mutex mutex;
  double sharded_ratio = 0;
  comm::run_threads(3, [&](const comm::Group& group) {
    Layers model;
    const auto sharded = fully_shard(*model, group, {.min_num_params = 1});
    const auto stats = sharded.stats();
    EXPECT_EQ(stats.num_parameters, 4 * (32 * 32 + 32));
    EXPECT_GT(stats.bytes_saved, 0);
    EXPECT_GE(stats.peak_bytes, stats.current_bytes);
    // A third of the parameters and padding.
    EXPECT_LT(stats.current_bytes, stats.num_parameters * 4 / 3 + 3000);
    int64_t local = 0;
    for (const at::Tensor& shard : sharded.parameters()) local += shard.numel();
    EXPECT_GE(static_cast<double>(local), stats.local_ratio * stats.num_parameters - 1e-6);
    const std::lock_guard lock(mutex);
    sharded_ratio += stats.local_ratio;
  });
  EXPECT_NEAR(sharded_ratio, 1, 1e-12);
  comm::run_threads(2, [](const comm::Group& group) {
    Layers model;
    EXPECT_EQ(fully_shard(*model, group, weights_only(Strategy::no_shard)).stats().local_ratio, 1);
  });
}

TEST(Stats, BytesOfAStep) {
  comm::run_threads(2, [](const comm::Group& group) {
    Layers model;
    auto sharded = fully_shard(*model, group, {.min_num_params = 1});
    const int64_t one = (32 * 32 + 32) * 4, all = 4 * one;
    const int64_t before = sharded.stats().current_bytes;
    const Batch batch = LayersTask::batch(0);
    LayersTask::loss(model->forward(batch.input), batch).backward();
    const auto stats = sharded.stats();
    EXPECT_GE(stats.current_bytes, before + all / 2) << "gradients of shards have come";
    EXPECT_GE(stats.gather_bytes, one) << "a unit at a time";
    EXPECT_LE(stats.gather_bytes, 3 * one) << "and what was fetched ahead, and a shard's gradient";
    EXPECT_GE(stats.gradient_bytes, one);
    EXPECT_LE(stats.gradient_bytes, 2 * one + 1000) << "two lines of gradients";
    EXPECT_GE(stats.peak_bytes, stats.current_bytes);
    EXPECT_EQ(stats.bytes_saved, 2 * all - stats.current_bytes);
  });
}

// ---- hybrid ----

// Without a size the ranks of each host are a group.
TEST(Hybrid, TakesTheHosts) {
  const FullyShardOptions options = weights_only(Strategy::hybrid_shard);
  const auto run = [&](std::vector<int> hosts, int expected) {
    comm::run_threads(
        4,
        [&](const comm::Group& group) {
          Layers model;
          const auto sharded = fully_shard(*model, group, options);
          EXPECT_EQ(sharded.options().advanced.hybrid_group_size, expected);
          const auto info = sharded.shard_info("layer0.weight");
          EXPECT_EQ(info.size, 1024 / expected);
          EXPECT_EQ(info.rank, group.rank() % expected);
        },
        {.backend = "thread"}, std::move(hosts));
  };
  run({0, 0, 1, 1}, 2);
  run({}, 4);
  EXPECT_THAT(error_of([&] {
                run({0, 1, 0, 1}, 2);
              }),
              HasSubstr("rank 1 is number 0 of 2 on its host"));
  EXPECT_THAT(error_of([&] { run({0, 1, 1, 1}, 2); }), HasSubstr("rank 0's host has 1"));
}

TEST(Hybrid, MeshAndGroupSizeAreTheSame) {
  const FullyShardOptions options = weights_only(Strategy::hybrid_shard);
  FullyShardOptions by_size = options;
  by_size.advanced.hybrid_group_size = 2;
  const ShardCurve expected = train_whole<LayersTask>(8, Optimizer::sgd, kFew);
  comm::run_threads(4, [&](const comm::Group& group) {
    const mesh::Mesh grid(group, {{"replicate", 2}, {"shard", 2}});
    const ShardCurve a = train_sharded<LayersTask>(grid, 8, Optimizer::sgd, options, kFew);
    const ShardCurve b = train_sharded<LayersTask>(mesh::Mesh::linear(group, "dp"), 8,
                                                   Optimizer::sgd, by_size, kFew);
    for (size_t i = 0; i < expected.weights.size(); ++i) {
      EXPECT_TRUE(at::equal(a.weights[i], b.weights[i]));
      EXPECT_LT(distance(a.weights[i], expected.weights[i]), 1e-6);
    }
    Layers model;
    const auto sharded = fully_shard(*model, grid, options);
    const auto info = sharded.shard_info("layer0.weight");
    EXPECT_EQ(info.rank, group.rank() % 2);
    EXPECT_EQ(info.size, 512);
    EXPECT_EQ(info.start, 512 * (group.rank() % 2));
  });
}

// ---- what the optimizer sees ----

TEST(OrigParams, NamesShapesAndGroups) {
  comm::run_threads(2, [](const comm::Group& group) {
    Layers model = LayersTask::make(1), plain = LayersTask::make(1);
    auto sharded = fully_shard(*model, group, {.min_num_params = 100, .use_orig_params = true});
    const auto decaying = optim::decay_groups(sharded.named_parameters(), 0.5);
    ASSERT_EQ(decaying.size(), 2u);
    std::set<std::string> weights, biases;
    for (const auto& [name, tensor, parts] : decaying[0].parameters) {
      weights.insert(name);
      EXPECT_EQ(tensor.dim(), 2) << name;
      EXPECT_EQ(tensor.size(1), 32) << name;
    }
    for (const auto& [name, tensor, parts] : decaying[1].parameters) biases.insert(name);
    EXPECT_THAT(biases, ElementsAre("layer0.bias", "layer1.bias", "layer2.bias", "layer3.bias"));
    for (const std::string& name : weights) EXPECT_THAT(name, HasSubstr(".weight"));
    optim::AdamW optimizer(decaying, {.lr = 1e-2});
    optim::AdamW reference(optim::decay_groups(*plain, 0.5), {.lr = 1e-2});
    for (int step = 0; step < kFew; ++step) {
      const Batch batch = LayersTask::batch(step);
      optimizer.zero_grad();
      LayersTask::loss(model->forward(batch.input), batch).backward();
      optimizer.step();
      reference.zero_grad();
      LayersTask::loss(plain->forward(batch.input), batch).backward();
      reference.step();
    }
    const auto values = by_name(sharded.full_state_dict());
    for (const auto& item : plain->named_parameters())
      EXPECT_LT(distance(values.at(item.key()), item.value()), 1e-6) << item.key();
  });
}

// Lockstep's optimizers and torch's, over shards and over a whole model.
template <class Make>
void expect_same_steps(Make make, const FullyShardOptions& options, double within = 1e-6) {
  comm::run_threads(2, [&](const comm::Group& group) {
    Layers model = LayersTask::make(1), plain = LayersTask::make(1);
    auto sharded = fully_shard(*model, group, options);
    auto optimizer = make(sharded.named_parameters());
    auto reference = make(optim::named_parameters(*plain));
    for (int step = 0; step < kFew; ++step) {
      optimizer->zero_grad();
      reference->zero_grad();
      const Batch mine = LayersTask::batch(2 * step + group.rank());
      LayersTask::loss(model->forward(mine.input), mine).backward();
      for (int i = 0; i < 2; ++i) {
        const Batch batch = LayersTask::batch(2 * step + i);
        (LayersTask::loss(plain->forward(batch.input), batch) / 2).backward();
      }
      optimizer->step();
      reference->step();
    }
    const auto values = by_name(sharded.full_state_dict());
    for (const auto& item : plain->named_parameters())
      EXPECT_LT(distance(values.at(item.key()), item.value()), within) << item.key();
  });
}

std::vector<at::Tensor> tensors(const std::vector<optim::NamedParameter>& named) {
  std::vector<at::Tensor> all;
  for (const auto& [name, tensor, parts] : named) all.push_back(tensor);
  return all;
}

TEST(Optimizers, StepAsOnAWholeModel) {
  using Parameters = std::vector<optim::NamedParameter>;
  for (const Strategy strategy :
       {Strategy::full_shard, Strategy::shard_grad_op, Strategy::optimizer, Strategy::no_shard}) {
    SCOPED_TRACE(name_of(strategy));
    const FullyShardOptions options = weights_only(strategy);
    expect_same_steps(
        [](const Parameters& p) {
          return std::make_unique<optim::SGD>(p, optim::SGDOptions{.lr = 0.1, .momentum = 0.9});
        },
        options);
    expect_same_steps(
        [](const Parameters& p) {
          return std::make_unique<optim::AdamW>(p, optim::AdamWOptions{.lr = 1e-3});
        },
        options, 1e-5);
    expect_same_steps(
        [](const Parameters& p) {
          return std::make_unique<torch::optim::SGD>(
              tensors(p), torch::optim::SGDOptions(0.1).momentum(0.9).nesterov(true));
        },
        options);
    expect_same_steps(
        [](const Parameters& p) {
          return std::make_unique<torch::optim::AdamW>(tensors(p),
                                                       torch::optim::AdamWOptions(1e-3));
        },
        options, 1e-5);
    expect_same_steps(
        [](const Parameters& p) {
          return std::make_unique<torch::optim::RMSprop>(tensors(p),
                                                         torch::optim::RMSpropOptions(1e-3));
        },
        options, 1e-4);
  }
}

// ---- options that change nothing but memory and time ----

TEST(SameNumbers, EveryOffloadAndNoSyncOptionTrainsAsOneProcess) {
  FullyShardOptions options = weights_only();
  options.advanced.keep_gathered_on_host = true;
  expect_follows<LayersTask>(2, options);
  options.advanced.keep_gathered_on_host = false;
  options.offload = parallel::HostOffload{};
  expect_follows<LayersTask>(2, options);
  options.offload = parallel::NoOffload{};
  options.no_sync = parallel::NoSyncGradients::sharded;
  expect_follows<LayersTask>(2, options);
  options.strategy = Strategy::optimizer;
  expect_follows<LayersTask>(2, options);
  options = weights_only();
  options.advanced.limit_all_gathers = false;
  options.advanced.prefetch_depth = 3;
  expect_follows<LayersTask>(3, options);
  options.advanced.forward_prefetch = options.advanced.backward_prefetch = parallel::Prefetch::post;
  expect_follows<LayersTask>(3, options);
  options.reproducible = true;
  expect_follows<LayersTask>(2, options);
}

TEST(SameNumbers, MoreRanksThanRowsTrainAsOneProcess) {
  expect_follows<MlpTask>(8, {.units = parallel::BySize{1}, .min_num_params = 1});
  expect_follows<MlpTask>(
      8, {.units = parallel::BySize{1}, .min_num_params = 1, .use_orig_params = true});
}

TEST(Memory, StopsGrowingAfterTheSecondStep) {
  using Make = std::function<std::function<void()>(parallel::ShardedModel&)>;
  const std::vector<Make> optimizers{
      [](parallel::ShardedModel& sharded) {
        const auto made = std::make_shared<torch::optim::AdamW>(sharded.parameters());
        return [made] {
          made->step();
          made->zero_grad();
        };
      },
      [](parallel::ShardedModel& sharded) {
        const auto made = std::make_shared<optim::SGD>(sharded.named_parameters());
        return [made] {
          made->step();
          made->zero_grad();
        };
      }};
  for (const Strategy strategy :
       {Strategy::full_shard, Strategy::shard_grad_op, Strategy::optimizer, Strategy::no_shard,
        Strategy::hybrid_shard}) {
    SCOPED_TRACE(name_of(strategy));
    for (const Make& make : optimizers) {
      comm::run_threads(4, [&](const comm::Group& group) {
        FullyShardOptions options = weights_only(strategy);
        if (strategy == Strategy::hybrid_shard) options.advanced.hybrid_group_size = 2;
        Layers model;
        auto sharded = fully_shard(*model, group, options);
        const auto step = make(sharded);
        int64_t growths = 0, bytes = 0;
        for (int i = 0; i < 20; ++i) {
          for (int micro = 0; micro < 2; ++micro) {
            std::optional<parallel::NoSyncShards> no_sync;
            if (micro == 0) no_sync.emplace(sharded.no_sync());
            const Batch batch = LayersTask::batch(i);
            LayersTask::loss(model->forward(batch.input), batch).backward();
          }
          step();
          const auto stats = sharded.stats();
          if (i == 1) {
            growths = stats.growths;
            bytes = stats.current_bytes;
          }
          if (i > 1) {
            EXPECT_EQ(stats.growths, growths) << "step " << i;
            EXPECT_EQ(stats.current_bytes, bytes) << "step " << i;
          }
        }
      });
    }
  }
}

}  // namespace
}  // namespace lockstep::test
