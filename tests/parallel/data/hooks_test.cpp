// SPDX-License-Identifier: Apache-2.0
// Gradient hooks and the tree of sums, by themselves.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>

#include <limits>

#include "lockstep/comm/collectives.h"
#include "lockstep/parallel/data/gradient_hook.h"
#include "lockstep/parallel/gradients/sum_tree.h"

namespace lockstep::parallel {
namespace {

// Averages one matrix over the group by a hook, `steps` times, and returns the mean of what came
// out.
at::Tensor mean_of_steps(const GradientHook& hook, const at::Tensor& gradient, int steps,
                         const comm::Group& group) {
  GradientBucket bucket;
  bucket.flat = at::empty({gradient.numel()});
  bucket.names = {"w"};
  bucket.gradients = {bucket.flat.view(gradient.sizes())};
  at::Tensor sum = at::zeros_like(gradient);
  for (int step = 0; step < steps; ++step) {
    bucket.flat.copy_(gradient.flatten());
    if (const auto complete = hook(bucket, group)) complete();
    sum += bucket.gradients[0];
  }
  return sum / steps;
}

TEST(PowerSgd, ErrorFeedbackMakesUpForWhatIsLeftOut) {
  comm::run_threads(2, [](comm::Group group) {
    const at::Tensor gradient = at::randn(
        {12, 10}, at::detail::createCPUGenerator(5u + static_cast<uint64_t>(group.rank())));
    at::Tensor average = gradient.clone();
    comm::all_reduce(average, group, {.op = comm::ReduceOp::avg}).wait();
    const auto error = [&](hooks::PowerSgdOptions options) {
      return ((mean_of_steps(hooks::power_sgd(options), gradient, 200, group) - average).norm() /
              average.norm())
          .item<double>();
    };
    EXPECT_LT(error({.rank = 2, .start_step = 0, .min_compression = 1}), 0.05);
    EXPECT_GT(error({.rank = 2, .start_step = 0, .min_compression = 1, .error_feedback = false}),
              0.3);
    EXPECT_LT(error({.rank = 2, .start_step = 1000}), 1e-5);                     // not begun
    EXPECT_LT(error({.rank = 2, .start_step = 0, .min_compression = 9}), 1e-5);  // not worth it
    // One step of a gradient that has rank 1 is exact.
    const at::Tensor thin =
        at::arange(1, 13).to(at::kFloat).outer(at::arange(1, 11).to(at::kFloat)) *
        (group.rank() + 1.0);
    const at::Tensor sent =
        mean_of_steps(hooks::power_sgd({.rank = 1, .start_step = 0}), thin, 1, group);
    EXPECT_TRUE(at::allclose(sent, thin * (1.5 / (group.rank() + 1.0)), 1e-4));
  });
}

TEST(PowerSgd, AGradientThatIsNotFiniteSpoilsOneStep) {
  comm::run_threads(2, [](comm::Group group) {
    const auto hook = hooks::power_sgd({.rank = 2, .start_step = 0, .min_compression = 1});
    const at::Tensor gradient = at::randn({12, 10}, at::detail::createCPUGenerator(5));
    for (int step = 0; step < 4; ++step) {
      at::Tensor mine = gradient.clone();
      if (step == 1 && group.rank() == 1) mine[3][4] = std::numeric_limits<float>::infinity();
      const at::Tensor sent = mean_of_steps(hook, mine, 1, group);
      EXPECT_EQ(at::isfinite(sent).all().item<bool>(), step != 1) << step;
    }
  });
}

TEST(Compression, SendsSharesNotSums) {
  comm::run_threads(3, [](comm::Group group) {
    const at::Tensor gradient = at::full({40, 3}, group.rank() == 0 ? 120000.0 : 3000.0);
    // Rank 0's gradient is beyond float16; the average is not.
    EXPECT_TRUE(at::allclose(mean_of_steps(hooks::fp16(), gradient, 1, group),
                             at::full({40, 3}, 42000.0), 1e-3));
    EXPECT_TRUE(at::allclose(mean_of_steps(hooks::by_name("bf16"), gradient, 1, group),
                             at::full({40, 3}, 42000.0), 1e-2));
  });
  EXPECT_FALSE(hooks::by_name("none"));
}

at::Tensor gradient_of(int rank) {
  return at::randn({301, 7}, at::detail::createCPUGenerator(5u + static_cast<uint64_t>(rank)));
}

TEST(AcrossHosts, OnOneHostIsPlainAveraging) {
  comm::run_threads(3, [](comm::Group group) {
    const at::Tensor gradient = gradient_of(group.rank()), average = gradient.clone();
    comm::all_reduce(average, group, {.op = comm::ReduceOp::avg}).wait();
    for (const char* name : {"fp16-across-hosts", "bf16-across-hosts"}) {
      EXPECT_TRUE(at::equal(mean_of_steps(hooks::by_name(name), gradient, 1, group), average));
    }
  });
}

TEST(AcrossHosts, AveragesOverAllRanks) {
  // Hosts of different sizes too, whose averages must not count the same.
  for (const std::vector<int>& hosts : std::vector<std::vector<int>>{
           {0, 0, 1, 1}, {0, 1, 1}, {0, 1}, {0, 1, 0, 1, 0, 2}, {0, 0, 0, 1, 1}}) {
    comm::run_threads(
        static_cast<int>(hosts.size()),
        [&](comm::Group group) {
          const at::Tensor gradient = gradient_of(group.rank()), average = gradient.clone();
          comm::all_reduce(average, group, {.op = comm::ReduceOp::avg}).wait();
          const auto error = [&](const GradientHook& hook) {
            const at::Tensor found = mean_of_steps(hook, gradient, 1, group), first = found.clone();
            comm::broadcast(first, group).wait();
            EXPECT_TRUE(at::equal(found, first));  // the same bits on all ranks
            return (found - average).abs().max().item<double>();
          };
          EXPECT_LT(error(hooks::across_hosts({})), 1e-6);
          EXPECT_LT(error(hooks::across_hosts(hooks::fp16())), 4e-3);
          EXPECT_LT(error(hooks::across_hosts(hooks::bf16())), 4e-2);
          EXPECT_GT(error(hooks::across_hosts(hooks::bf16())), 0);
        },
        {.backend = "thread"}, hosts);
  }
}

TEST(AcrossHosts, AFailureIsThrownOnCompletion) {
  comm::run_threads(4,
                    [](comm::Group group) {
                      const GradientHook hook =
                          hooks::across_hosts([](GradientBucket&, const comm::Group&) {
                            throw std::runtime_error("cannot compress");
                            return std::function<void()>();
                          });
                      GradientBucket bucket;
                      bucket.flat = at::ones({64});
                      const auto complete = hook(bucket, group);
                      EXPECT_THROW(complete(), std::runtime_error);
                    },
                    {.backend = "thread"}, {0, 0, 1, 1});
}

TEST(SumTree, CombinesAsRanksAre) {
  for (int leaves = 1; leaves <= 17; ++leaves) {
    std::vector<at::Tensor> values;
    for (int i = 0; i < leaves; ++i)
      values.push_back(at::randn({50}, at::detail::createCPUGenerator(static_cast<uint64_t>(i))));
    detail::SumTree tree;
    for (int i = 0; i + 1 < leaves; ++i) tree.push(values[static_cast<size_t>(i)]);
    const at::Tensor sum = values.back().clone();
    tree.finish(sum);
    comm::run_threads(leaves, [&](comm::Group group) {
      const at::Tensor mine = values[static_cast<size_t>(group.rank())].clone();
      comm::all_reduce_ordered(mine, group).wait();
      EXPECT_TRUE(at::equal(mine, sum)) << leaves;
    });
  }
}

}  // namespace
}  // namespace lockstep::parallel
