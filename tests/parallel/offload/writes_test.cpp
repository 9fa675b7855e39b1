// SPDX-License-Identifier: Apache-2.0
// Offloaded models in the hands of others: parameters that are written, state that is loaded in
// part or shown, backward passes that come twice, ranks whose shares differ.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "lockstep/core/error.h"
#include "lockstep/memory/meter.h"
#include "lockstep/parallel/shard/sharded_model_state.h"
#include "tests/parallel/offload/training.h"
#include "tests/support/sampling.h"
#include "tests/support/says.h"

namespace lockstep::test {
namespace {

using layout::ClipMode;
using layout::OffloadOptions;
using layout::OffloadStrategy;
using layout::UpdateSite;
using parallel::OffloadedAdamW;
using parallel::ShardedModel;
using testing::HasSubstr;
using testing::ThrowsMessage;

// ---- writes by others ----

struct Way {
  const char* name;
  std::function<void(int, const ShardedModel&)> write;
};

const std::vector<Way> kWays{
    {"shards", [](int, const ShardedModel& model) { write_shards(model); }},
    {"shards, in one step only",
     [](int step, const ShardedModel& model) {
       if (step == 2) write_shards(model);
     }},
    {"begin_update twice",
     [](int, ShardedModel model) {
       model.begin_update();
       write_shards(model);
       model.begin_update();
       write_shards(model);
     }},
    {"begin_update twice, and nothing written",
     [](int, ShardedModel model) {
       model.begin_update();
       model.begin_update();
     }},
    {"summon twice",
     [](int step, ShardedModel model) {
       for (int time = 0; time < 2; ++time) {
         const auto whole = model.summon({.write_back = true});
         const at::NoGradGuard no_grad;
         for (const auto& parameter : model.shared()->model->parameters())
           parameter.mul_(1 - 0.1 / (1 + step + time));
       }
     }},
};

TEST(OffloadWrites, ByOthersAfterAStepCountAsWithoutOffload) {
  int turn = 0;
  for (const Way& way : kWays) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      for (const UpdateSite site : {UpdateSite::cpu, UpdateSite::device}) {
        for (const ClipMode clip : {ClipMode::exact, ClipMode::none}) {
          if (turn++ % 3 != 0 && !tests_all()) continue;
          const OffloadRun run{.dtype = dtype,
                               .clip = clip == ClipMode::none ? 0 : 0.05,
                               .after = [&](int step, const ShardedModel& model,
                                            optim::Optimizer&) { way.write(step, model); }};
          for (const int ranks : {1, 2}) expect_same(ranks, run, everything(site, clip), way.name);
        }
      }
    }
  }
}

// Between backward and the step that uses its gradients.
TEST(OffloadWrites, ByOthersBeforeAStepCountAsWithoutOffload) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (const UpdateSite site : {UpdateSite::cpu, UpdateSite::device}) {
      const OffloadRun run{
          .dtype = dtype,
          .before = [](int, const ShardedModel& model, optim::Optimizer&) { write_shards(model); }};
      for (const int ranks : {1, 2}) expect_same(ranks, run, everything(site), "before a step");
    }
  }
}

// ---- updates in backward ----

struct Small {
  explicit Small(const OffloadOptions& offload, at::ScalarType dtype = at::kFloat,
                 bool use_orig_params = true)
      : tower(make(dtype)),
        sharded(parallel::fully_shard(*tower, comm::Group{},
                                      {.units = parallel::ByType{{"Layer"}},
                                       .use_orig_params = use_orig_params,
                                       .offload = offload})),
        optimizer(sharded, {.lr = 3e-3}) {}

  static Tower make(at::ScalarType dtype) {
    Tower tower(3, 40);
    fill_parameters(*tower, 3);
    tower->to(dtype);
    return tower;
  }
  void backward(double factor = 1) {
    (tower->forward(at::ones({2, 40})).square().mean() * factor).backward();
  }

  Tower tower;
  ShardedModel sharded;
  OffloadedAdamW optimizer;
};

TEST(OffloadWrites, ASecondBackwardBeforeStepIsRefusedWhereTheFirstHasUpdated) {
  for (const UpdateSite site : {UpdateSite::cpu, UpdateSite::device}) {
    Small small(everything(site, ClipMode::none));
    small.backward();
    EXPECT_THAT(
        [&] { small.backward(); },
        ThrowsMessage<std::exception>(AllOf(says("updated ... already"), HasSubstr("no_sync()"))));
  }
  // Several are one step where all but the last are under no_sync().
  Small small(everything(UpdateSite::device, ClipMode::none));
  for (int step = 0; step < 3; ++step) {
    {
      const auto held = small.sharded.no_sync();
      small.backward();
    }
    small.backward();
    small.optimizer.step();
  }
}

TEST(OffloadWrites, ClippingWithoutKeptGradientsIsRefused) {
  Small small(everything(UpdateSite::device, ClipMode::none));
  small.backward();
  EXPECT_THAT([&] { small.sharded.clip_grad_norm_(1); },
              ThrowsMessage<ConfigError>(
                  AllOf(HasSubstr("[clip_grad_norm_] clip_mode none"), HasSubstr("grad_norm()"))));
  EXPECT_GT(small.sharded.grad_norm(), 0);
}

TEST(OffloadWrites, TheNormOfGradientsThatAreGoneIsThatOfAllRanks) {
  for (const int ranks : {1, 2, 4}) {
    for (const int accumulation : {1, 2}) {
      const OffloadRun run{.accumulation = accumulation, .clip = 0, .measures = true};
      comm::run_threads(ranks, [&](const comm::Group& group) {
        const OffloadCurve plain = train_offloaded(group, run, {});
        const OffloadCurve moved =
            train_offloaded(group, run, everything(UpdateSite::device, ClipMode::none));
        ASSERT_EQ(plain.norms.size(), moved.norms.size());
        for (size_t step = 0; step < plain.norms.size(); ++step) {
          EXPECT_GT(plain.norms[step], 0);
          EXPECT_NEAR(moved.norms[step], plain.norms[step], 1e-5 * plain.norms[step])
              << ranks << " ranks, step " << step;
        }
      });
    }
  }
}

TEST(OffloadWrites, TheNormShowsGradientsThatAreNotFinite) {
  Small small(everything(UpdateSite::device, ClipMode::none));
  small.backward(INFINITY);
  EXPECT_FALSE(std::isfinite(small.sharded.grad_norm()));
}

// ---- ranks ----

// Of 45 rows one rank has 23, which take two pages, the other 22, which take one: by itself it
// would leave parameters where the first cannot.
TEST(OffloadWrites, RanksAgreeOnWhereParametersRest) {
  comm::run_threads(2, [](const comm::Group& group) {
    int differing_shares = 0, mixed = 0;
    for (int64_t budget = 16 * kKiB; budget <= 64 * kKiB; budget += 4 * kKiB) {
      Tower model(4, 45);
      fill_parameters(*model, 3);
      OffloadOptions offload = everything();
      offload.advanced.strategy = OffloadStrategy::conservative;
      offload.grads = offload.optimizer = false;
      offload.param_budget = budget;
      std::optional<ShardedModel> sharded;
      at::Tensor accepted = at::ones({1}, at::kLong);
      try {
        sharded = parallel::fully_shard(
            *model, group,
            {.units = parallel::ByType{{"Layer"}}, .min_num_params = 100, .offload = offload});
      } catch (const ConfigError&) {
        accepted.zero_();
      }
      comm::all_reduce(accepted, group, {.op = comm::ReduceOp::min}).wait();
      if (accepted.item<int64_t>() == 0) continue;
      const auto stats = parallel::offload_stats(*sharded);
      const at::Tensor mine = at::tensor({stats.params_on_device, stats.params_on_host});
      at::Tensor all = at::zeros({2, 2}, at::kLong);
      comm::all_gather(all, mine, group).wait();
      // Layers that rest on the host, by the bytes of each rank's share of one.
      const int64_t layers_0 = (all[0][1] * 4 / all[0].sum()).round().item<int64_t>(),
                    layers_1 = (all[1][1] * 4 / all[1].sum()).round().item<int64_t>();
      EXPECT_EQ(layers_0, layers_1) << budget;
      differing_shares += !all[0].equal(all[1]);
      mixed += layers_0 > 0 && layers_0 < 4;
    }
    EXPECT_GT(differing_shares, 0);
    EXPECT_GT(mixed, 0);
  });
}

// ---- state that is shown and loaded ----

// What is written into some of the state leaves the rest as it was.
TEST(OffloadWrites, StateLoadedInPartLeavesTheRest) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (const UpdateSite site : {UpdateSite::cpu, UpdateSite::device}) {
      Small small(everything(site), dtype);
      for (int step = 0; step < 2; ++step) {
        small.backward();
        small.optimizer.step();
        small.optimizer.zero_grad();
      }
      std::vector<at::Tensor> before;
      for (const auto& entry : small.optimizer.state()) before.push_back(entry.tensor.clone());
      const auto shown = small.optimizer.lazy_state();
      const std::string chosen = shown[0].name;
      ASSERT_TRUE(chosen.ends_with(".exp_avg"));
      small.optimizer.refresh(chosen);
      shown[0].tensor.fill_(0.5);
      small.optimizer.adopt(chosen);
      const auto after = small.optimizer.state();
      ASSERT_EQ(after.size(), before.size());
      for (size_t i = 0; i < after.size(); ++i) {
        const at::Tensor expected = i == 0 ? at::full_like(before[0], 0.5) : before[i];
        EXPECT_TRUE(after[i].tensor.equal(expected)) << after[i].name;
      }
    }
  }
}

// What checkpoints were shown is theirs: the optimizer keeps nothing of it.
TEST(OffloadWrites, ShownStateIsFreedWithItsTensors) {
  memory::Meter::install();
  Small small(everything());
  small.backward();
  small.optimizer.step();
  small.optimizer.wait();
  const int64_t before = memory::Meter::current();
  auto shown = small.optimizer.lazy_state();
  for (const auto& entry : shown) small.optimizer.refresh(entry.name);
  EXPECT_GE(memory::Meter::current(), before + 3 * 2 * 40 * 40 * 4);
  // A part keeps its tensor, as slices of checkpoints do, and no other.
  at::Tensor part = shown[0].tensor.narrow(0, 0, 1);
  const float first = part.view({-1})[0].item<float>();
  shown.clear();
  EXPECT_GE(memory::Meter::current(), before + 40 * 40 * 4);
  EXPECT_LT(memory::Meter::current(), before + 2 * 40 * 40 * 4);
  EXPECT_EQ(part.view({-1})[0].item<float>(), first);
  part.reset();
  EXPECT_LT(memory::Meter::current(), before + 1000);
  // And it is shown anew.
  EXPECT_EQ(small.optimizer.state()[0].tensor.view({-1})[0].item<float>(), first);
}

}  // namespace
}  // namespace lockstep::test
