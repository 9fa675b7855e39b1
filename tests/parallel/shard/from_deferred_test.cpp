// SPDX-License-Identifier: Apache-2.0
// Models that are built without memory and sharded tensor by tensor.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <malloc.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/optim/sgd.h>
#include <torch/utils.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <mutex>

#include "tests/parallel/shard/support.h"

namespace lockstep::test {
namespace {

using parallel::deferred;
using parallel::fully_shard;

// Large enough to be without memory.
constexpr int64_t kShardedWidth = 192;

// Parameters, a buffer and a tensor that only the class knows, all random; and small ones.
struct WideNetImpl : torch::nn::Module {
  WideNetImpl()
      : first(register_module("first", torch::nn::Linear(kShardedWidth, kShardedWidth))),
        norm(register_module("norm",
                             torch::nn::LayerNorm(torch::nn::LayerNormOptions({kShardedWidth})))),
        second(register_module("second", torch::nn::Linear(kShardedWidth, 8))),
        table(register_buffer("table", at::randn({kShardedWidth, kShardedWidth}) * 0.1)),
        secret(at::rand({kShardedWidth, kShardedWidth})) {}
  at::Tensor forward(const at::Tensor& x) {
    return second(norm(at::tanh(first(x)).matmul(table).matmul(secret)));
  }
  torch::nn::Linear first;
  torch::nn::LayerNorm norm;
  torch::nn::Linear second;
  at::Tensor table, secret;
};
TORCH_MODULE(WideNet);

WideNet make_net() { return {}; }

at::Tensor deferred_loss(WideNet net, int64_t index) {
  const at::Tensor x = at::sin(at::arange(4 * kShardedWidth, at::kFloat) * (1 + 0.1 * index));
  return net->forward(x.view({4, kShardedWidth})).square().mean();
}

TEST(FromDeferred, ValuesAreThoseOfMaterialize) {
  WideNet plain = parallel::materialize(deferred(make_net), {.seed = 3});
  for (const int ranks : {1, 2, 3}) {
    for (const Strategy strategy :
         {Strategy::full_shard, Strategy::shard_grad_op, Strategy::optimizer, Strategy::no_shard}) {
      SCOPED_TRACE(name_of(strategy));
      comm::run_threads(ranks, [&](const comm::Group& group) {
        auto built = deferred(make_net);
        const auto sharded =
            fully_shard(built, mesh::Mesh::linear(group, "dp"),
                        {.strategy = strategy, .min_num_params = 100}, {.seed = 3});
        const auto values = by_name(sharded.full_state_dict());
        EXPECT_EQ(values.size(), 7u);
        for (const auto& item : plain->named_parameters())
          EXPECT_TRUE(at::equal(values.at(item.key()), item.value())) << item.key();
        EXPECT_TRUE(at::equal(values.at("table"), plain->table));
        EXPECT_TRUE(at::equal(built.model->table, plain->table));
        EXPECT_TRUE(at::equal(built.model->secret, plain->secret));
        const at::NoGradGuard no_grad;
        EXPECT_TRUE(at::equal(deferred_loss(built.model, 0), deferred_loss(plain, 0)));
      });
    }
  }
}

TEST(FromDeferred, Trains) {
  for (const int ranks : {1, 3}) {
    comm::run_threads(ranks, [](const comm::Group& group) {
      WideNet plain = parallel::materialize(deferred(make_net), {.seed = 3});
      auto built = deferred(make_net);
      WideNet model = built.model;
      const at::Tensor weight = model->first->weight;
      auto sharded =
          fully_shard(built, mesh::Mesh::linear(group, "dp"), {.min_num_params = 100}, {.seed = 3});
      EXPECT_TRUE(weight.is_same(model->first->weight));
      EXPECT_TRUE(weight.requires_grad() && weight.is_leaf());
      torch::optim::SGD optimizer(sharded.parameters(), 0.1);
      torch::optim::SGD reference(plain->parameters(), 0.1);
      for (int step = 0; step < 3; ++step) {
        optimizer.zero_grad();
        reference.zero_grad();
        deferred_loss(model, step).backward();
        deferred_loss(plain, step).backward();
        optimizer.step();
        reference.step();
      }
      const auto values = by_name(sharded.full_state_dict());
      for (const auto& item : plain->named_parameters())
        EXPECT_LT(distance(values.at(item.key()), item.value()), 1e-5) << item.key();
    });
  }
}

TEST(FromDeferred, UserRulesInitializeShards) {
  comm::run_threads(2, [](const comm::Group& group) {
    auto built = deferred(make_net);
    const auto rule = [](const at::Tensor& parameter, const lockstep::nn::init::Source& source) {
      if (source.name != "first.weight") return false;
      lockstep::nn::init::constant_(parameter, 0.5);
      return true;
    };
    const auto sharded =
        fully_shard(built, mesh::Mesh::linear(group, "dp"), {}, {.seed = 3, .rule = rule});
    const auto values = by_name(sharded.full_state_dict());
    EXPECT_TRUE(values.at("first.weight").eq(0.5).all().item<bool>());
    EXPECT_FALSE(values.at("second.weight").eq(0.5).any().item<bool>());
  });
}

size_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  size_t size = 0, resident = 0;
  file >> size >> resident;
  return resident * static_cast<size_t>(sysconf(_SC_PAGESIZE));
}

// Both ranks are in this process: together they hold one model, and each the tensor that it is
// about to share out.
TEST(FromDeferred, MemoryOfShardsAndOneTensor) {
  constexpr int64_t kLayers = 12, kWidth = 1448;
  constexpr size_t kTensor = kWidth * kWidth * sizeof(float), kModel = kLayers * kTensor;
  const auto make = [] {
    torch::nn::Sequential layers;
    for (int64_t i = 0; i < kLayers; ++i)
      layers->push_back(torch::nn::Linear(torch::nn::LinearOptions(kWidth, kWidth).bias(false)));
    return layers;
  };
  std::mutex mutex;
  size_t most = 0;
  const auto look = [&](const at::Tensor&, const lockstep::nn::init::Source&) {
    const std::lock_guard lock(mutex);
    most = std::max(most, resident_bytes());
    return false;
  };
  // What is freed goes back to the system at once, and is not counted.
  mallopt(M_MMAP_THRESHOLD, 1 << 20);
  const size_t before = resident_bytes();
  comm::run_threads(2, [&](const comm::Group& group) {
    auto built = deferred(make);
    const auto sharded = fully_shard(built, mesh::Mesh::linear(group, "dp"), {}, {.rule = look});
    look({}, {});
    EXPECT_EQ(sharded.stats().current_bytes, static_cast<int64_t>(kModel / 2));
  });
  EXPECT_LT(most - before, kModel + 4 * kTensor);
}

}  // namespace
}  // namespace lockstep::test
