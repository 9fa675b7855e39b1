// SPDX-License-Identifier: Apache-2.0
// Gradients of parameters that every tensor-parallel rank has, over several backwards.
#include <gtest/gtest.h>
#include <torch/types.h>

#include <optional>

#include "lockstep/comm/group.h"
#include "lockstep/nn/loss.h"
#include "lockstep/parallel/data/ddp.h"
#include "lockstep/parallel/shard/fully_shard.h"
#include "tests/parallel/tensor/net.h"

namespace lockstep::test {
namespace {

using parallel::TensorParallel;

// Gradients that are summed already are not summed again, whatever comes between two calls.
TEST(TensorParallel, GradientsOfWholeParametersAddUpOverBackwards) {
  for (const int ranks : {2, 4}) {
    comm::run_threads(ranks, [&](const comm::Group& group) {
      Net whole = made(), net = made();
      net->norm->weight.set_requires_grad(false);  // and back before it is used
      const TensorParallel shared =
          parallel::tensor_parallel(*net, group, plan(), {.sequence_parallel = true});
      net->norm->weight.set_requires_grad(true);
      const auto backward = [&](int64_t rows) {
        const at::Tensor input = tokens(rows, 11), target = input.flatten().roll(1);
        nn::cross_entropy(whole(input).flatten(0, 1), target).backward();
        nn::cross_entropy(net(input).flatten(0, 1), target, {.group = group, .vocab = 11})
            .backward();
      };
      const auto twice_over_one_graph = [&](int64_t rows) {
        for (Net* each : {&whole, &net}) {
          const at::Tensor loss = (*each)(tokens(rows, 11)).square().sum();
          for (int i = 0; i < 2; ++i) loss.backward({}, /*retain_graph=*/true);
        }
      };
      const auto same = [&](const char* when) {
        SCOPED_TRACE(when);
        expect_gradients(*net, shared, *whole);
      };
      backward(3);
      shared.reduce_gradients();
      same("once");
      shared.reduce_gradients();
      same("again");
      backward(2);
      shared.reduce_gradients();
      same("another backward");
      backward(1);
      twice_over_one_graph(3);
      shared.reduce_gradients();
      same("several backwards, two over one graph");
      for (Net* each : {&whole, &net}) {
        for (const at::Tensor& parameter : (*each)->parameters()) parameter.grad().mul_(0.5);
      }
      backward(1);
      shared.reduce_gradients();
      same("a backward after the gradients were scaled");
      backward(2);
      for (Net* each : {&whole, &net}) {
        for (const at::Tensor& parameter : (*each)->parameters()) parameter.grad().zero_();
      }
      backward(3);
      shared.reduce_gradients();
      same("zeroed in place");
      whole->zero_grad(true);
      net->zero_grad(true);
      backward(2);
      shared.reduce_gradients();
      shared.reduce_gradients();
      same("made undefined");
    });
  }
}

// The same with the model wrapped for data parallelism: each of dp ranks has a part of the batch.
TEST(TensorParallel, GradientsOfWholeParametersAddUpUnderWrappers) {
  for (const bool sharded : {false, true}) {
    comm::run_threads(4, [&](const comm::Group& world) {
      const comm::Group tp = world.split(world.rank() / 2, world.rank());
      const comm::Group dp = world.split(world.rank() % 2, world.rank());
      Net whole = made(), net = made();
      for (Net* each : {&whole, &net}) (*each)->dropout->eval();  // ranks have other rows
      const TensorParallel shared =
          parallel::tensor_parallel(*net, tp, plan(), {.sequence_parallel = true});
      std::optional<parallel::DistributedDataParallel<Net>> ddp;
      std::optional<parallel::ShardedModel> shards;
      if (sharded) {
        shards.emplace(parallel::fully_shard(
            *net, dp,
            {.units = parallel::OneUnit{}, .min_num_params = 1, .use_orig_params = true}));
      } else {
        ddp.emplace(parallel::ddp(net, dp));
      }
      for (const int64_t rows : {2, 4, 2}) {
        const at::Tensor input = tokens(rows, 11), target = input.flatten().roll(1);
        nn::cross_entropy(whole(input).flatten(0, 1), target).backward();
        const auto mine = input.chunk(2)[static_cast<size_t>(dp.rank())];
        const at::Tensor output = ddp ? ddp->forward(mine) : net(mine);
        nn::cross_entropy(output.flatten(0, 1), target.chunk(2)[static_cast<size_t>(dp.rank())],
                          {.scale = 2, .group = tp, .vocab = 11})
            .backward();
        for (int call = 0; call < 2; ++call) {
          if (sharded) {
            shared.reduce_gradients(shards->named_parameters());
          } else {
            shared.reduce_gradients();
          }
        }
      }
      if (!sharded) return expect_gradients(*net, shared, *whole);
      for (const auto& [name, rows, parts] : shards->named_parameters()) {
        const at::Tensor expected = whole->named_parameters()[name].grad();
        const auto split = shared.split(name, expected.sizes().vec());
        if (!split.is_whole()) continue;
        const auto info = shards->shard_info(name);
        EXPECT_TRUE(at::allclose(rows.grad().flatten(),
                                 expected.flatten().narrow(0, info.start, info.size), 1e-4, 1e-6))
            << name << " on rank " << world.rank();
      }
    });
  }
}

}  // namespace
}  // namespace lockstep::test
