// SPDX-License-Identifier: Apache-2.0
// Offloaded SGD, and parameters of float16 and float64: the bits of training without offload, on
// every tier, and refusals that say what to change.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "lockstep/core/error.h"
#include "lockstep/optim/grad_scaler.h"
#include "lockstep/parallel/shard/sharded_model_state.h"
#include "tests/parallel/offload/training.h"
#include "tests/support/sampling.h"
#include "tests/support/subprocess.h"

namespace lockstep::test {
namespace {

using layout::ClipMode;
using layout::OffloadOptions;
using layout::OffloadStrategy;
using layout::UpdateRule;
using layout::UpdateSite;
using optim::SGDOptions;
using parallel::ShardedModel;
using testing::AllOf;
using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr at::ScalarType kTypes[] = {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble};
constexpr UpdateSite kSites[] = {UpdateSite::cpu, UpdateSite::device};
const SGDOptions kPlain{.lr = 0.1, .weight_decay = 0.01};
const SGDOptions kDamped{.lr = 0.1, .momentum = 0.9, .dampening = 0.3, .weight_decay = 0.01};
const SGDOptions kNesterov{.lr = 0.1, .momentum = 0.8, .nesterov = true};

std::string text_of(const SGDOptions& sgd, at::ScalarType dtype, UpdateSite site) {
  return std::string(c10::toString(dtype)) + ", momentum " + std::to_string(sgd.momentum) + ", " +
         std::string(layout::name_of(site));
}

// On a device that holds little more than what is being used, because this state is small.
OffloadOptions tight(at::ScalarType dtype, UpdateSite site, ClipMode clip = ClipMode::exact) {
  OffloadOptions offload = everything(site, clip);
  offload.device_limit = (dtype == at::kDouble ? 1024 : 512) * kKiB;
  return offload;
}

TEST(OffloadRules, SgdHasTheSameBits) {
  int turn = 0;
  for (const SGDOptions& sgd : {kPlain, kDamped, kNesterov}) {
    for (const at::ScalarType dtype : kTypes) {
      for (const UpdateSite site : kSites) {
        for (const ClipMode clip : {ClipMode::exact, ClipMode::none}) {
          const int ranks = 1 + turn++ % 2;
          for (const int each : {1, 2}) {
            if (each != ranks && !tests_all()) continue;
            const OffloadRun run{
                .dtype = dtype, .sgd = sgd, .clip = clip == ClipMode::none ? 0 : 0.05};
            expect_same(each, run, tight(dtype, site, clip), text_of(sgd, dtype, site));
          }
        }
      }
    }
  }
}

// Some of it, or all, stays on the device.
TEST(OffloadRules, EverySwitchByItself) {
  for (int switches = 1; switches < 8; ++switches) {
    OffloadOptions offload = everything(kSites[switches % 2]);
    offload.params = switches & 1;
    offload.grads = switches & 2;
    offload.optimizer = switches & 4;
    const at::ScalarType dtype = kTypes[switches % 4];
    offload.device_limit = dtype == at::kDouble ? 2 * kMiB : kMiB;
    for (const SGDOptions& sgd : {kPlain, kDamped}) {
      const OffloadRun run{.accumulation = 1 + switches % 2, .dtype = dtype, .sgd = sgd};
      comm::run_threads(1 + switches % 2, [&](const comm::Group& group) {
        EXPECT_TRUE(train_offloaded(group, run, {}) == train_offloaded(group, run, offload))
            << "switches " << switches << ", momentum " << sgd.momentum;
      });
    }
  }
  OffloadOptions roomy = everything(UpdateSite::cpu);
  roomy.device_limit = 16 * kMiB;
  roomy.advanced.strategy = OffloadStrategy::conservative;
  for (const SGDOptions& sgd : {kPlain, kDamped}) expect_same(1, {.sgd = sgd}, roomy, "stays");
}

TEST(OffloadRules, FlatShards) {
  for (const at::ScalarType dtype : {at::kHalf, at::kDouble}) {
    expect_same(2, {.dtype = dtype, .use_orig_params = false}, everything(), "flat AdamW");
    expect_same(2, {.dtype = dtype, .sgd = kDamped, .use_orig_params = false}, everything(),
                "flat SGD");
  }
}

TEST(OffloadRules, AdamWInBackwardHasTheSameBits) {
  for (const at::ScalarType dtype : {at::kHalf, at::kDouble}) {
    for (const UpdateSite site : kSites)
      expect_same(2, {.dtype = dtype, .clip = 0}, everything(site, ClipMode::none), "in backward");
  }
}

TEST(OffloadRules, StateOnDiskHasTheSameBits) {
  const TempDir folder;
  struct Case {
    at::ScalarType dtype;
    std::optional<SGDOptions> sgd;
    int64_t host;
    const char* codecs;
    UpdateSite site;
  };
  // Parameters and gradients are on the host, and there is little room beside them.
  const Case cases[] = {
      {at::kFloat, kNesterov, 700, "none", UpdateSite::device},
      {at::kBFloat16, kDamped, 400, "none", UpdateSite::cpu},
      {at::kDouble, kDamped, 1400, "lossless", UpdateSite::cpu},
      {at::kHalf, kPlain, 380, "none", UpdateSite::device},
      {at::kHalf, std::nullopt, 400, "none", UpdateSite::device},
      {at::kDouble, std::nullopt, 1400, "none", UpdateSite::cpu},
      {at::kHalf, std::nullopt, 400, "lossless", UpdateSite::cpu},
  };
  for (const auto& [dtype, sgd, host, codecs, site] : cases) {
    SCOPED_TRACE(std::string(c10::toString(dtype)) + " " + std::to_string(host) + " " + codecs);
    const bool wide = dtype == at::kDouble;
    const OffloadRun run{.layers = 6, .dtype = dtype, .sgd = sgd};
    const OffloadOptions offload{
        .param_budget = (wide ? 256 : 128) * kKiB,
        .host_budget = host * kKiB,
        .device_limit = (wide ? 768 : 320) * kKiB,
        .codec = layout::parse_state_codecs(codecs),
        .disk = folder.path(),
        .advanced = {
            .host_limit = 64 * kMiB, .strategy = OffloadStrategy::extreme, .update_site = site}};
    const OffloadCurve plain = train_offloaded({}, run, {});
    const OffloadCurve moved = train_offloaded({}, run, offload);
    ASSERT_EQ(plain.losses, moved.losses);
    EXPECT_TRUE(plain == moved);
    EXPECT_GT(moved.stats.state_on_disk, 0);
    EXPECT_GT(moved.stats.from_disk, 0);
    EXPECT_LE(moved.stats.host_peak, offload.host_budget);
    EXPECT_LE(moved.stats.device_peak, offload.device_limit);
  }
}

// ---- what rests where ----

// Bytes of an element of state, in slices whose parts begin at multiples of 256 bytes.
TEST(OffloadRules, StateHasTheBytesOfItsRule) {
  struct Case {
    std::optional<SGDOptions> sgd;
    at::ScalarType dtype;
    int64_t bytes;
  };
  const Case cases[] = {
      {std::nullopt, at::kFloat, 8}, {std::nullopt, at::kBFloat16, 10},
      {std::nullopt, at::kHalf, 12}, {std::nullopt, at::kDouble, 16},
      {kDamped, at::kFloat, 4},      {kDamped, at::kBFloat16, 8},
      {kDamped, at::kHalf, 8},       {kDamped, at::kDouble, 8},
      {kPlain, at::kFloat, 0},       {kPlain, at::kBFloat16, 4},
      {kPlain, at::kHalf, 4},        {kPlain, at::kDouble, 0},
  };
  constexpr int64_t kWidth = 64;  // whose products are whole parts
  for (const auto& [sgd, dtype, bytes] : cases) {
    OffloadOptions offload = everything();
    offload.device_limit = 16 * kMiB;
    const OffloadCurve curve = train_offloaded(
        {}, {.layers = 2, .width = kWidth, .steps = 1, .dtype = dtype, .sgd = sgd}, offload);
    const int64_t state = curve.stats.state_on_host + curve.stats.state_on_device;
    EXPECT_NEAR(state, bytes * 2 * (kWidth * kWidth + kWidth), 512) << c10::toString(dtype);
    EXPECT_EQ(curve.stats.state_kept.plain, curve.stats.state_on_host);
  }
}

// ---- codecs ----

TEST(OffloadRules, CodecsOfMomentumTrainNearlyAsWellOnBothSites) {
  for (const at::ScalarType dtype : {at::kFloat, at::kHalf}) {
    const OffloadRun run{.steps = 10, .dtype = dtype, .sgd = kDamped, .clip = 0};
    const OffloadCurve plain = train_offloaded({}, run, {});
    OffloadRun other = run;
    other.sgd = kPlain;
    // What momentum does to the loss, of which codecs lose little.
    const double effect =
        std::abs(train_offloaded({}, other, {}).losses.back() - plain.losses.back());
    for (const char* codecs :
         {"bf16", "int8", "exp_avg=quantization", "fp16,params=bf16,grads=bf16", "params=int8"}) {
      const OffloadCurve coded = train_offloaded({}, run, kept_as(codecs, UpdateSite::cpu));
      EXPECT_FALSE(plain == coded) << codecs << " has lost nothing";
      for (size_t step = 0; step < plain.losses.size(); ++step)
        EXPECT_NEAR(coded.losses[step], plain.losses[step], 0.02 * plain.losses[step]) << codecs;
      EXPECT_TRUE(coded == train_offloaded({}, run, kept_as(codecs, UpdateSite::device))) << codecs;
      if (std::string(codecs).find("params") != std::string::npos) continue;
      EXPECT_LT(std::abs(coded.losses.back() - plain.losses.back()), 0.2 * effect) << codecs;
      if (dtype == at::kFloat) {
        EXPECT_LT(coded.stats.state_kept.ratio(), 0.55) << codecs;
      }
    }
  }
}

TEST(OffloadRules, CodecsOfFloat16TrainNearlyAsWellOnBothSites) {
  const OffloadRun run{.steps = 10, .dtype = at::kHalf};
  comm::run_threads(2, [&](const comm::Group& group) {
    const OffloadCurve plain = train_offloaded(group, run, {});
    for (const char* codecs : {"bf16", "quantization", "quantization,params=int8"}) {
      const OffloadCurve coded = train_offloaded(group, run, kept_as(codecs, UpdateSite::cpu));
      for (size_t step = 0; step < plain.losses.size(); ++step)
        EXPECT_NEAR(coded.losses[step], plain.losses[step], 0.02 * plain.losses[step]) << codecs;
      EXPECT_FALSE(plain == coded) << codecs << " has lost nothing";
      EXPECT_TRUE(coded == train_offloaded(group, run, kept_as(codecs, UpdateSite::device)))
          << codecs;
    }
  });
}

TEST(OffloadRules, LosslessHasTheSameBits) {
  for (const at::ScalarType dtype : kTypes) {
    for (const std::optional<SGDOptions>& sgd :
         {std::optional(kDamped), std::optional<SGDOptions>()})
      expect_same(1, {.dtype = dtype, .sgd = sgd, .clip = 0},
                  kept_as("lossless,params=lossless", UpdateSite::cpu), "lossless");
  }
}

// ---- writes by others ----

TEST(OffloadRules, WritesByOthersCountAsWithoutOffload) {
  int turn = 0;
  for (const at::ScalarType dtype : kTypes) {
    for (const std::optional<SGDOptions>& sgd :
         {std::optional(kDamped), std::optional(kPlain), std::optional<SGDOptions>()}) {
      const UpdateSite site = kSites[turn % 2];
      const ClipMode clip = turn % 4 < 2 ? ClipMode::exact : ClipMode::none;
      OffloadRun run{.dtype = dtype, .sgd = sgd, .clip = clip == ClipMode::none ? 0 : 0.05};
      // Once between steps, then before a step, then with whole parameters.
      run.after = [](int step, ShardedModel model, optim::Optimizer&) {
        if (step == 0) write_shards(model);
        if (step != 2) return;
        const auto whole = model.summon({.write_back = true});
        const at::NoGradGuard no_grad;
        for (const auto& parameter : model.shared()->model->parameters()) parameter.mul_(0.9);
      };
      if (clip == ClipMode::exact) {
        run.before = [](int step, const ShardedModel& model, optim::Optimizer&) {
          if (step == 1) write_shards(model);
        };
      }
      expect_same(1 + turn++ / 2 % 2, run, tight(dtype, site, clip),
                  std::string(c10::toString(dtype)));
    }
  }
}

// ---- state that is shown and loaded ----

TEST(OffloadRules, StateIsThatOfTheOptimizerWithoutOffload) {
  for (const at::ScalarType dtype : kTypes) {
    for (const std::optional<SGDOptions>& sgd :
         {std::optional(kNesterov), std::optional(kPlain), std::optional<SGDOptions>()}) {
      using Entries = std::vector<optim::NamedTensor>;
      const auto states = [&](std::optional<OffloadOptions> offload) {
        std::vector<Entries> all;
        OffloadRun run{.steps = 3, .dtype = dtype, .sgd = sgd};
        const auto look = [&](int step, const ShardedModel&, optim::Optimizer& optimizer) {
          if (step == 1) return;
          Entries now = optimizer.state();
          if (step == 2) {  // loads what it has
            const at::NoGradGuard no_grad;
            for (auto& entry : now) entry.tensor = entry.tensor.clone();
            optimizer.load_state(now);
            now = optimizer.state();
          }
          for (auto& entry : now) entry.tensor = entry.tensor.clone();
          all.push_back(std::move(now));
        };
        run.before = [&](int step, const ShardedModel& model, optim::Optimizer& optimizer) {
          if (step == 0) look(0, model, optimizer);  // before the first update
        };
        run.after = look;
        train_offloaded({}, run, offload);
        return all;
      };
      const auto plain = states({}), moved = states(everything());
      ASSERT_EQ(plain.size(), 3U);
      ASSERT_EQ(moved.size(), plain.size());
      for (size_t time = 0; time < plain.size(); ++time) {
        ASSERT_EQ(plain[time].size(), moved[time].size());
        for (size_t i = 0; i < plain[time].size(); ++i) {
          const auto& [name, tensor] = plain[time][i];
          EXPECT_EQ(moved[time][i].name, name);
          EXPECT_EQ(moved[time][i].tensor.scalar_type(), tensor.scalar_type()) << name;
          EXPECT_TRUE(moved[time][i].tensor.equal(tensor)) << name << ", " << time;
        }
      }
    }
  }
}

// ---- loss scales ----

// The scaler puts float32 gradients in the place of float16 ones, which are freed while the update
// goes on.
TEST(OffloadRules, ScaledLossesHaveTheSameBits) {
  const auto trained = [](std::optional<OffloadOptions> offload,
                          const std::optional<SGDOptions>& sgd) {
    Tower model(4, 112);
    fill_parameters(*model, 3);
    model->to(at::kHalf);
    auto sharded = parallel::fully_shard(*model, comm::Group{},
                                         {.units = parallel::ByType{{"Layer"}},
                                          .use_orig_params = true,
                                          .offload = offload_for(offload, sgd)});
    const auto optimizer = make_optimizer(sharded, offload.has_value(), sgd);
    optim::GradScaler scaler(
        {}, {.init_scale = 0x1p40, .backoff_factor = 0x1p-20, .growth_interval = 2});
    for (int step = 0; step < 8; ++step) {
      const at::Tensor loss = model->forward(at::ones({2, 112}) * (1 + step)).square().mean();
      scaler.scale(loss).backward();
      scaler.step(*optimizer);
      scaler.update();
      optimizer->zero_grad();
    }
    EXPECT_GT(scaler.skipped_steps(), 0);
    EXPECT_LT(scaler.skipped_steps(), 6);
    std::vector<at::Tensor> weights;
    for (const auto& [name, tensor] : sharded.full_state_dict()) weights.push_back(tensor);
    return weights;
  };
  for (const std::optional<SGDOptions>& sgd :
       {std::optional(kDamped), std::optional<SGDOptions>()}) {
    const auto plain = trained({}, sgd);
    for (const UpdateSite site : kSites) {
      for (const bool grads : {true, false}) {
        OffloadOptions offload = everything(site);
        offload.grads = grads;
        const auto moved = trained(offload, sgd);
        ASSERT_EQ(plain.size(), moved.size());
        for (size_t i = 0; i < plain.size(); ++i)
          EXPECT_TRUE(plain[i].equal(moved[i])) << i << ", " << layout::name_of(site) << grads;
      }
    }
    EXPECT_THAT(
        [&] { trained(everything(UpdateSite::cpu, ClipMode::none), sgd); },
        ThrowsMessage<ConfigError>(AllOf(HasSubstr("[GradScaler]"), HasSubstr("clip_mode"))));
  }
}

TEST(OffloadRules, GradientsOfOtherTypesAreRefused) {
  const OffloadRun run{.dtype = at::kBFloat16,
                       .clip = 0,
                       .before = [](int, const ShardedModel& model, optim::Optimizer&) {
                         for (const auto& parameter : model.named_parameters()) {
                           at::Tensor& gradient = parameter.tensor.mutable_grad();
                           gradient = gradient.to(at::kFloat);
                         }
                       }};
  EXPECT_THAT(
      [&] { train_offloaded({}, run, everything()); },
      ThrowsMessage<ConfigError>(AllOf(HasSubstr("the gradient of 'layer"), HasSubstr("is Float"),
                                       HasSubstr("must be BFloat16"))));
}

// ---- refusals ----

ShardedModel arranged(Tower& tower, UpdateRule rule) {
  OffloadOptions offload = everything();
  offload.advanced.update_rule = rule;
  return parallel::fully_shard(*tower, comm::Group{},
                               {.units = parallel::ByType{{"Layer"}}, .offload = offload});
}

TEST(OffloadRules, AnOptimizerThatWasNotPlannedForIsRefused) {
  const auto expect_refused = [](UpdateRule rule, const auto& make, const char* name,
                                 const char* wanted) {
    Tower tower(2, 40);
    fill_parameters(*tower, 3);
    const ShardedModel sharded = arranged(tower, rule);
    EXPECT_THAT([&] { make(sharded); },
                ThrowsMessage<ConfigError>(
                    AllOf(HasSubstr(name), HasSubstr(std::string(layout::name_of(rule))),
                          HasSubstr(std::string("offload.advanced.update_rule ") + wanted))));
  };
  const auto adamw = [](const ShardedModel& model) { parallel::OffloadedAdamW(model, {}); };
  const auto sgd = [](double momentum) {
    return
        [=](const ShardedModel& model) { parallel::OffloadedSGD(model, {.momentum = momentum}); };
  };
  expect_refused(UpdateRule::sgd, adamw, "[OffloadedAdamW]", "adamw");
  expect_refused(UpdateRule::adamw, sgd(0), "[OffloadedSGD]", "sgd");
  expect_refused(UpdateRule::adamw, sgd(0.9), "[OffloadedSGD]", "sgd_momentum");
  expect_refused(UpdateRule::sgd, sgd(0.9), "[OffloadedSGD]", "sgd_momentum");
  expect_refused(UpdateRule::sgd_momentum, sgd(0), "[OffloadedSGD]", "sgd");
  Tower tower(2, 40);
  fill_parameters(*tower, 3);
  const ShardedModel sharded = arranged(tower, UpdateRule::sgd_momentum);
  EXPECT_THAT([&] { parallel::OffloadedSGD(sharded, {.lr = -1, .momentum = 0.5}); },
              ThrowsMessage<ConfigError>(HasSubstr("lr is -1")));
  EXPECT_THAT(
      [&] {
        parallel::OffloadedSGD(sharded, {.momentum = 0.5, .dampening = 0.1, .nesterov = true});
      },
      ThrowsMessage<ConfigError>(HasSubstr("nesterov")));
}

TEST(OffloadRules, CodecsOfFloat64AreRefused) {
  for (const char* codecs : {"bf16", "exp_avg_sq=quantization", "params=int8", "grads=bf16"}) {
    EXPECT_THAT(
        [&] { train_offloaded({}, {.dtype = at::kDouble}, kept_as(codecs, UpdateSite::cpu)); },
        ThrowsMessage<ConfigError>(
            AllOf(HasSubstr("float64"), HasSubstr(codecs), HasSubstr("none or lossless"))));
  }
}

}  // namespace
}  // namespace lockstep::test
