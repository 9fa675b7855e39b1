// SPDX-License-Identifier: Apache-2.0
#include "lockstep/mesh/model_parallel_context.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/cuda.h>

#include <array>
#include <cstring>
#include <map>
#include <memory>
#include <numeric>
#include <string>

#include "lockstep/comm/custom_backend.h"
#include "tests/mesh/rank_checks.h"

namespace lockstep::mesh {
namespace {

using comm::Group;
using comm::run_threads;

ModelParallelConfig config_for(int devices, Strategy strategy) {
  ModelParallelConfig config{.num_devices = devices, .strategy = strategy};
  config.device_ids.resize(devices);
  std::iota(config.device_ids.begin(), config.device_ids.end(), 0);
  return config;
}

TEST(ModelParallelConfig, Defaults) {
  const ModelParallelConfig config;
  EXPECT_EQ(config.num_devices, 1);
  EXPECT_EQ(config.device_ids, std::vector<int>{0});
  EXPECT_EQ(config.strategy, Strategy::pipeline);
  EXPECT_FALSE(config.pipeline_depth.has_value());
  EXPECT_FALSE(config.tensor_split_dim.has_value());
  EXPECT_FALSE(config.gradient_checkpointing);
  EXPECT_EQ(config.backend_name(), "auto");
  EXPECT_EQ((ModelParallelConfig{.backend = "mine"}.backend_name()), "mine");
  EXPECT_NO_THROW(config.validate(1));
}

TEST(ModelParallelConfig, StrategyNames) {
  for (const auto strategy : {Strategy::pipeline, Strategy::tensor, Strategy::hybrid}) {
    EXPECT_EQ(parse_strategy(name_of(strategy)), strategy);
  }
  require_refused([] { parse_strategy("expert"); }, "one of pipeline, tensor, hybrid");
}

TEST(ModelParallelConfig, RejectsBadDeviceCountsAndIds) {
  const auto refused = [](const ModelParallelConfig& config, int group_size, const char* part) {
    require_refused([&] { config.validate(group_size); }, part);
  };
  refused({.num_devices = 0}, 1, "0 devices ... at least 1");
  refused(config_for(4, Strategy::tensor), 2, "4 devices ... group size 2");
  refused({.num_devices = 4}, 4, "device ids (0) are 1 ... host has 4 ranks");
  refused({.device_ids = {0, 1}}, 1, "device ids (0, 1) are 2, more than the 1 devices");
  EXPECT_NO_THROW((ModelParallelConfig{.num_devices = 4, .device_ids = {0, 1}}.validate(4, 2)));
  refused({.num_devices = 2, .device_ids = {1, 1}}, 2, "device ids (1, 1) must differ");
  refused({.num_devices = 2, .device_ids = {0, -1}}, 2, "device ids (0, -1) ... at least 0");
  refused({.backend = ""}, 1, "backend's name ... empty");
  auto config = config_for(4, Strategy::pipeline);
  config.pipeline_depth = 3;
  refused(config, 4, "4 devices ... divisible ... depth 3");
  config.pipeline_depth = 0;
  refused(config, 4, "pipeline depth 0 ... at least 1");
  config.strategy = Strategy::tensor;
  config.pipeline_depth = 2;
  refused(config, 4, "pipeline depth 2 ... tensor strategy ... 1");
  config.pipeline_depth = 1;
  EXPECT_NO_THROW(config.validate(4));
}

TEST(ModelParallelConfig, MeshOfEachStrategy) {
  using Axes = std::vector<Axis>;
  EXPECT_EQ(config_for(6, Strategy::pipeline).mesh_axes(), (Axes{{"pp", 6}}));
  EXPECT_EQ(config_for(6, Strategy::tensor).mesh_axes(), (Axes{{"row", 3}, {"col", 2}}));
  EXPECT_EQ(config_for(5, Strategy::tensor).mesh_axes(), (Axes{{"row", 5}, {"col", 1}}));
  EXPECT_EQ(config_for(12, Strategy::hybrid).mesh_axes(), (Axes{{"dp", 3}, {"tp", 2}, {"pp", 2}}));
  auto deep = config_for(12, Strategy::hybrid);
  deep.pipeline_depth = 3;
  EXPECT_EQ(deep.mesh_axes(), (Axes{{"dp", 2}, {"tp", 2}, {"pp", 3}}));
  deep.strategy = Strategy::pipeline;
  EXPECT_EQ(deep.mesh_axes(), (Axes{{"dp", 4}, {"pp", 3}}));
}

TEST(ModelParallelContext, OneDeviceNeedsNoLauncher) {
  const ModelParallelContext context({}, Group());
  EXPECT_EQ(context.rank(), 0);
  EXPECT_EQ(context.size(), 1);
  EXPECT_EQ(context.mesh().shape(), std::vector<int>{1});
  const auto whole = at::arange(6).reshape({2, 3});
  EXPECT_TRUE(at::equal(context.all_gather(context.partition(whole)), whole));
}

TEST(ModelParallelContext, OperationsOfEveryStrategy) {
  for (const int world : {1, 2, 3, 4, 6, 8}) {
    for (const auto strategy : {Strategy::pipeline, Strategy::tensor, Strategy::hybrid}) {
      run_threads(world, [&](Group group) {
        auto config = config_for(world, strategy);
        config.tensor_split_dim = -1;
        const ModelParallelContext context(config, group);
        require_equal(context.mesh().axes(), config.mesh_axes());
        require_equal(context.device(), at::Device(at::kCPU));

        const auto whole = at::arange(35, at::kFloat).reshape({5, 7});
        const auto columns = context.partition(whole);
        require_equal(columns.partition().dim, 1);
        require_same(context.all_gather(columns), whole);
        require_equal(context.partition(whole, {.dim = 0}).partition().dim, 0);
        const auto rows = context.redistribute(columns, 0);
        require_same(rows.local(), context.partition(whole, {.dim = 0}).local());
        require_same(context.reduce_scatter(whole).all_gather(), whole * world);

        const auto value = at::full({3}, float(context.rank()));
        context.broadcast(value, "", {.root = world - 1}).wait();
        require_same(value, at::full({3}, float(world - 1)));
        const auto one = at::ones({3});
        context.all_reduce(one).wait();
        require_same(one, at::full({3}, float(world)));
      });
    }
  }
}

TEST(ModelParallelContext, OperationsOverOneAxis) {
  run_threads(8, [](Group group) {
    const ModelParallelContext context(config_for(8, Strategy::hybrid), group);
    const auto& mesh = context.mesh();
    const auto whole = at::arange(15, at::kFloat).reshape({3, 5});
    const auto shard = context.partition(whole, {.dim = 1, .axis = "tp"});
    require_equal(shard.partition().partitions, 2);
    require_same(context.all_gather(shard), whole);
    require_same(context.reduce_scatter(whole, {.axis = "dp"}).all_gather(), whole * 2);
    const auto one = at::ones({1});
    context.all_reduce(one, "pp").wait();
    require_same(one, at::full({1}, 2.0f));

    const auto activation = at::full({4}, float(mesh.coordinate("tp")));
    if (mesh.coordinate("pp") == 0) {
      context.send(activation, 1, "pp").wait();
    } else {
      const auto got = at::zeros({4});
      context.recv(got, 0, "pp").wait();
      require_same(got, activation);
    }
    require_refused([&] { context.partition(whole, {.axis = "ep"}); }, "axis 'ep' ... dp, tp, pp");
    require_refused([&] { context.partition(whole, {.dim = 2}); }, "split dim 2");
  });
}

// Devices have numbers of their own on each host.
TEST(ModelParallelContext, DevicesAreThoseOfTheRanksHost) {
  const std::vector<int> hosts{0, 0, 1, 1, 1};
  run_threads(
      5,
      [](Group group) {
        ModelParallelConfig config{.num_devices = 5, .device_ids = {3, 5, 7}};
        const ModelParallelContext context(config, group);
        const std::vector<int> expected{3, 5, 3, 5, 7};
        require_equal(context.device_id(), expected[static_cast<size_t>(context.rank())]);
        for (int rank = 0; rank < 5; ++rank)  // each rank knows those of the others
          require_equal(context.device_id(rank), expected[static_cast<size_t>(rank)]);
        require_refused([&] { context.device_id(5); }, "rank 5 ... at least 0 ... below 5");
        // Too few for one of the hosts: refused by all ranks, so that none waits for another.
        config.device_ids = {3, 5};
        require_refused([&] { ModelParallelContext(config, group); },
                        "device ids (3, 5) are 2 ... host has 3 ranks");
      },
      {.backend = "thread"}, hosts);
  // One behind the other or in turn: the group knows.
  run_threads(4,
              [](Group group) {
                const ModelParallelContext context({.num_devices = 4, .device_ids = {0, 1}}, group);
                require_equal(context.device_id(), context.rank() / 2);
              },
              {.backend = "thread"}, {0, 1, 0, 1});
}

TEST(ModelParallelContext, BackendMustBeTheGroups) {
  // One rank communicates with nobody.
  EXPECT_NO_THROW(ModelParallelContext({.backend = "mpi"}, Group()));
  run_threads(2, [](Group group) {
    auto config = config_for(2, Strategy::pipeline);
    config.backend = "mpi";
    require_refused([&] { ModelParallelContext(config, group); }, "backend mpi ... thread");
    config.backend = "thread";
    require_equal(ModelParallelContext(config, group).size(), 2);
    config.backend = "auto";
    require_equal(ModelParallelContext(config, group).size(), 2);
  });
}

TEST(ModelParallelContext, DevicesByRankAndByCoordinate) {
  run_threads(8, [](Group group) {
    const ModelParallelContext context(config_for(8, Strategy::hybrid), group);
    const at::Device cpu(at::kCPU);  // thread ranks communicate in host memory
    require_equal(context.device_at(7).value(), cpu);
    require_equal(context.device_at({1, 0, 1}).value(), cpu);
    require_equal(context.device_at(std::array{0, 0, 0}).value(), context.device());
    require_equal(context.device_at(8).has_value(), false);
    require_equal(context.device_at(-1).has_value(), false);
    require_equal(context.device_at({1, 0, 2}).has_value(), false);
    require_refused([&] { static_cast<void>(context.device_at({1, 0})); }, "has 2 entries");
  });
}

TEST(ModelParallelContext, LocalShapesAndCommunication) {
  run_threads(4, [](Group group) {
    auto config = config_for(4, Strategy::tensor);
    config.tensor_split_dim = 1;
    const ModelParallelContext context(config, group);
    const auto whole = at::arange(60, at::kFloat).reshape({6, 10});
    for (const CutOptions& cut :
         {CutOptions{}, CutOptions{.dim = 0}, CutOptions{.dim = -1, .axis = "row"}}) {
      const auto tensor = context.partition(whole, cut);
      require_equal(context.local_shape({6, 10}, cut), tensor.local().sizes().vec());
      require_equal(tensor.local_shape(), tensor.local().sizes().vec());
    }
    const auto columns = context.partition(whole);
    require_equal(columns.local_shape(), (layout::Shape{6, group.rank() < 3 ? 3 : 1}));
    require_equal(context.requires_communication(columns, TensorOp::reduce, 1), true);
    require_equal(context.requires_communication(columns, TensorOp::reduce, 0), false);
  });
}

// Bytes between ranks as values of the store through which they found each other.
class StoreTransport : public comm::Transport {
 public:
  explicit StoreTransport(const comm::TransportSite& site) : site_(site) {}

  void send(int peer, std::span<const std::byte> data) override {
    site_.store->set(key(site_.rank, peer, sent_[peer]++),
                     {reinterpret_cast<const char*>(data.data()), data.size()});
  }
  void recv(int peer, std::span<std::byte> data) override {
    std::string& stream = received_[peer];
    while (stream.size() < data.size())
      stream += site_.store->get(key(peer, site_.rank, taken_[peer]++), Deadline(site_.timeout));
    std::memcpy(data.data(), stream.data(), data.size());
    stream.erase(0, data.size());
  }
  void abort() noexcept override {}

 private:
  std::string key(int from, int to, int number) const {
    return site_.name + "/" + std::to_string(from) + ">" + std::to_string(to) + "/" +
           std::to_string(number);
  }

  comm::TransportSite site_;
  std::map<int, int> sent_, taken_;
  std::map<int, std::string> received_;
};

TEST(ModelParallelContext, BackendOfTheUsersOwn) {
  comm::register_backend("store_values", [](const comm::TransportSite& site) {
    return std::make_unique<StoreTransport>(site);
  });
  run_threads(4,
              [](Group group) {
                auto config = config_for(4, Strategy::tensor);
                config.backend = "store_values";
                const ModelParallelContext context(config, group);
                require_equal(context.group().backend(), "store_values");
                require_equal(context.group("col").backend(), "store_values");
                const auto whole = at::arange(35, at::kFloat).reshape({5, 7});
                const auto rows = context.redistribute(context.partition(whole, {.dim = 1}), 0);
                require_same(context.all_gather(rows), whole);
                config.backend = "thread";
                require_refused([&] { ModelParallelContext(config, group); },
                                "backend thread ... store_values");
              },
              {.backend = "store_values"});
  // init() asks for it by that name.
  require_equal(ModelParallelContext::init({.backend = "store_values"}).size(), 1);
}

}  // namespace
}  // namespace lockstep::mesh
