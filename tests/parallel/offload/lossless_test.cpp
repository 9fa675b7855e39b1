// SPDX-License-Identifier: Apache-2.0
// Parameters and gradients that LZ4 compresses on the host: the same bits in fewer bytes, also
// where ranks read each other's parameters, and whatever a program does to gradients between steps.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "lockstep/core/system_memory.h"
#include "tests/parallel/offload/training.h"

namespace lockstep::test {
namespace {

using layout::OffloadOptions;
using layout::UpdateSite;
using parallel::OffloadStats;
using parallel::ShardedModel;
using parallel::ShardingStrategy;

constexpr const char* kBoth = "params=lossless,grads=lossless";

// On a device that holds little more than a layer.
OffloadOptions lossless(const char* codecs = kBoth) {
  OffloadOptions options = kept_as(codecs, UpdateSite::cpu);
  options.device_limit = 448 * kKiB;
  options.param_budget = 128 * kKiB;
  return options;
}

void expect_same_bits(const comm::Group& group, const OffloadRun& run,
                      const OffloadOptions& offload, const std::string& what) {
  OffloadCurve plain = train_offloaded(group, run, {});
  const OffloadCurve moved = train_offloaded(group, run, offload);
  ASSERT_EQ(plain.losses, moved.losses) << what;
  // One rank has flat parameters only where it offloads: squares are summed in another order.
  if (group.size() == 1 && !run.use_orig_params && run.clip == 0) {
    for (size_t i = 0; i < plain.norms.size(); ++i)
      EXPECT_NEAR(plain.norms[i], moved.norms[i], 1e-12 * plain.norms[i]) << what;
    plain.norms = moved.norms;
  }
  EXPECT_TRUE(plain == moved) << what;
  EXPECT_LE(moved.stats.host_peak, moved.stats.host_budget) << what;
  // What does not shrink is kept as it is, in whole pages.
  const int64_t pages = 2 * run.layers * static_cast<int64_t>(page_size());
  if (offload.codec.params == codec::Codec::lossless) {
    EXPECT_GT(moved.stats.params_kept.plain, 0) << what;
    EXPECT_LE(moved.stats.params_kept.bytes, moved.stats.params_kept.plain + pages) << what;
  }
  if (offload.codec.grads == codec::Codec::lossless) {
    EXPECT_GT(moved.stats.grads_kept.plain, 0) << what;
    EXPECT_LE(moved.stats.grads_kept.bytes, moved.stats.grads_kept.plain + pages) << what;
  }
}

// ---- parameters ----

TEST(OffloadLossless, RanksHaveTheSameBits) {
  for (const char* backend : {"thread", "shm", "gloo"}) {
    for (const int ranks : {2, 4}) {
      for (const bool use_orig_params : {true, false}) {
        comm::run_threads(ranks,
                          [&](const comm::Group& group) {
                            OffloadRun run{
                                .layers = 3, .steps = 3, .use_orig_params = use_orig_params};
                            run.dtype = use_orig_params ? at::kFloat : at::kBFloat16;
                            expect_same_bits(group, run, lossless(), backend);
                          },
                          {.backend = backend});
      }
    }
  }
}

// Updates in backward rewrite what peers have read in it.
TEST(OffloadLossless, UpdatesInBackwardHaveTheSameBits) {
  for (const char* backend : {"shm", "gloo"}) {
    comm::run_threads(4,
                      [&](const comm::Group& group) {
                        OffloadOptions offload = lossless("lossless,params=lossless");
                        offload.advanced.clip_mode = layout::ClipMode::none;
                        expect_same_bits(group, {.steps = 8, .clip = 0}, offload, backend);
                      },
                      {.backend = backend});
  }
}

struct Shown {
  std::vector<at::Tensor> weights;
  OffloadStats stats;
};

// Steps of a tower with options of its own; then the parameters, whole.
Shown trained(const comm::Group& group, parallel::FullyShardOptions options, bool offloads,
              const std::function<void(Tower)>& fill) {
  Tower model(3, 96);
  fill(model);
  options.units = parallel::ByType{{"Layer"}};
  options.min_num_params = 100;
  options.use_orig_params = true;
  if (offloads) options.offload = lossless();
  auto sharded = parallel::fully_shard(*model, group, options);
  const auto optimizer = make_optimizer(sharded, offloads, std::nullopt);
  for (int step = 0; step < 3; ++step) {
    model->forward(at::ones({2, 96}) * (1 + group.rank() + step)).square().mean().backward();
    sharded.clip_grad_norm_(0.05);
    optimizer->step();
    optimizer->zero_grad();
  }
  Shown shown;
  shown.stats = parallel::offload_stats(sharded);
  for (const auto& [name, tensor] : sharded.full_state_dict()) shown.weights.push_back(tensor);
  return shown;
}

bool same(const Shown& a, const Shown& b) {
  for (size_t i = 0; i < a.weights.size(); ++i) {
    if (!a.weights[i].equal(b.weights[i])) return false;
  }
  return a.weights.size() == b.weights.size();
}

TEST(OffloadLossless, StrategiesAndTypesHaveTheSameBits) {
  const auto fill = [](Tower model) { fill_parameters(*model, 3); };
  for (const auto strategy :
       {ShardingStrategy::full_shard, ShardingStrategy::hybrid_shard, ShardingStrategy::no_shard}) {
    for (const bool mixed : {false, true}) {
      comm::run_threads(
          4,
          [&](const comm::Group& group) {
            parallel::FullyShardOptions options{.strategy = strategy};
            if (strategy == ShardingStrategy::hybrid_shard) options.advanced.hybrid_group_size = 2;
            if (mixed) options.mixed_precision = {.param = at::kBFloat16, .reduce = at::kFloat};
            const Shown plain = trained(group, options, false, fill);
            const Shown moved = trained(group, options, true, fill);
            EXPECT_TRUE(same(plain, moved)) << static_cast<int>(strategy) << " " << mixed;
            EXPECT_GT(moved.stats.params_kept.plain, 0);
          },
          {.backend = "shm"});
    }
  }
}

// Values that are alike take few bytes of the host, and of its budget.
TEST(OffloadLossless, WhatCompressesWellIsSmall) {
  const auto fill = [](Tower model) {
    const at::NoGradGuard no_grad;
    for (const at::Tensor& parameter : model->parameters()) parameter.fill_(0.01);
  };
  for (const int ranks : {1, 2}) {
    comm::run_threads(
        ranks,
        [&](const comm::Group& group) {
          Tower model(4, 112);
          fill(model);
          const auto stats = [&](const char* codecs) {
            Tower copy(4, 112);
            fill(copy);
            const auto sharded = parallel::fully_shard(*copy, group,
                                                       {.units = parallel::ByType{{"Layer"}},
                                                        .min_num_params = 100,
                                                        .offload = lossless(codecs)});
            // All columns are alike, so gradients of rows are too.
            copy->forward(at::ones({2, 112})).square().mean().backward();
            return parallel::offload_stats(sharded);
          };
          const OffloadStats none = stats("none"), small = stats(kBoth);
          EXPECT_LT(small.params_kept.ratio(), 0.3) << ranks;
          EXPECT_LT(small.grads_kept.ratio(), 0.3) << ranks;
          EXPECT_EQ(small.params_kept.plain, none.params_kept.plain);
          EXPECT_EQ(small.params_kept.bytes, small.params_on_host);
          const double saved = static_cast<double>(none.host_bytes - small.host_bytes);
          EXPECT_GT(saved,
                    0.6 * static_cast<double>(none.params_kept.plain + none.grads_kept.plain))
              << ranks;
        },
        {.backend = "shm"});
  }
}

// ---- gradients ----

TEST(OffloadLossless, GradientsHaveTheSameBits) {
  const OffloadRun runs[] = {
      {.steps = 3, .clip = 0},
      {.steps = 3, .accumulation = 3},  // spilled unreduced
      {.steps = 3, .accumulation = 2, .dtype = at::kBFloat16},
      {.steps = 3, .zeroes = false},  // they add up
      {.steps = 3, .clip = 0, .measures = true, .use_orig_params = false},
      {.steps = 3, .dtype = at::kDouble, .sgd = optim::SGDOptions{.lr = 0.01, .momentum = 0.9}}};
  for (const int ranks : {1, 2}) {
    comm::run_threads(ranks, [&](const comm::Group& group) {
      int index = 0;
      for (const OffloadRun& run : runs) {
        expect_same_bits(group, run, lossless("grads=lossless"),
                         "run " + std::to_string(index++) + " of " + std::to_string(ranks));
      }
    });
  }
}

struct Gradients {
  Tower model{2, 96};
  ShardedModel sharded;
  at::Tensor input = at::ones({2, 96});

  explicit Gradients(const char* codecs, bool optimizer = true)
      : sharded((fill_parameters(*model, 3), shard(*model, codecs, optimizer))) {}
  static ShardedModel shard(torch::nn::Module& model, const char* codecs, bool optimizer) {
    OffloadOptions offload = lossless(codecs);
    offload.device_limit = offload.param_budget = 512 * kKiB;
    offload.optimizer = optimizer;
    if (!optimizer) offload.advanced.update_site = UpdateSite::automatic;
    return parallel::fully_shard(
        model, comm::Group{},
        {.units = parallel::ByType{{"Layer"}}, .use_orig_params = true, .offload = offload});
  }
  void backward() { (model->forward(input)).square().mean().backward(); }
};

// Whatever is read of them, or written, by operators or past them, between a backward and the step.
TEST(OffloadLossless, ProgramsReadAndWriteGradients) {
  const auto run = [](const char* codecs) {
    Gradients each(codecs);
    parallel::OffloadedAdamW optimizer(each.sharded, {.lr = 1e-2});
    std::vector<at::Tensor> seen;
    const auto look = [&] {
      for (const at::Tensor& parameter : each.sharded.parameters())
        seen.push_back(parameter.grad().clone());
    };
    const at::NoGradGuard no_grad;
    for (int step = 0; step < 3; ++step) {
      {
        const at::AutoGradMode grad(true);
        each.backward();
      }
      if (step > 0) look();
      for (const at::Tensor& parameter : each.sharded.parameters()) {
        const at::Tensor& gradient = parameter.grad();
        if (step == 1) gradient.mul_(0.5);
        if (step != 2) continue;
        EXPECT_TRUE(gradient.sum().isfinite().item<bool>());
        gradient.data_ptr<float>()[1] = 3;  // memory is there after an operator
      }
      if (step == 2) each.sharded.clip_grad_norm_(0.1);
      look();
      optimizer.step();
      look();  // while the update runs, or after it
      if (step == 1) optimizer.zero_grad();
    }
    seen.push_back(each.model->forward(each.input).clone());
    return seen;
  };
  const auto plain = run("none"), packed = run("grads=lossless");
  ASSERT_EQ(plain.size(), packed.size());
  for (size_t i = 0; i < plain.size(); ++i) EXPECT_TRUE(plain[i].equal(packed[i])) << i;
}

// Other optimizers than the offloaded ones, and what is clipped by value.
TEST(OffloadLossless, OtherOptimizersReadGradients) {
  const auto run = [](const char* codecs) {
    Gradients each(codecs, /*optimizer=*/false);
    optim::AdamW optimizer(each.sharded.named_parameters(), {.lr = 1e-2});
    for (int step = 0; step < 3; ++step) {
      each.backward();
      optim::clip_grad_value_(each.sharded.parameters(), 1e-3);
      optimizer.step();
      optimizer.zero_grad();
    }
    EXPECT_GT(parallel::offload_stats(each.sharded).grads_kept.plain, 0);
    const at::NoGradGuard no_grad;
    return each.model->forward(each.input).clone();
  };
  EXPECT_TRUE(run("none").equal(run("grads=lossless")));
}

// A gradient that a program holds has its values when the model has gone.
TEST(OffloadLossless, GradientsOutliveTheModel) {
  at::Tensor gradient, before;
  {
    Gradients each("grads=lossless");
    each.backward();
    gradient = each.sharded.parameters()[0].grad();
    before = gradient.clone();
    const at::NoGradGuard no_grad;
    each.model->forward(each.input);  // by now it is compressed again
  }
  EXPECT_TRUE(before.equal(gradient));
  EXPECT_TRUE(before.any().item<bool>());
}

}  // namespace
}  // namespace lockstep::test
