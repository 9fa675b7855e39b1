// SPDX-License-Identifier: Apache-2.0
#include "lockstep/config/offload_rules.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "lockstep/config/input_files.h"
#include "lockstep/core/error.h"
#include "tests/support/refused.h"
#include "tests/support/says.h"
#include "tests/support/subprocess.h"

namespace lockstep::config {
namespace {

using codec::Codec;
using layout::ClipMode;
using layout::OffloadOptions;
using layout::UpdateSite;
using test::refused;
using test::says;
using testing::ThrowsMessage;

constexpr int64_t kGB = int64_t{1} << 30;

TrainConfig offloading() {
  TrainConfig config;
  config.data.path = "data.txt";
  config.offload.params = config.offload.grads = config.offload.optimizer = true;
  return config;
}

using Change = std::function<void(TrainConfig&)>;

void expect_valid(const Change& change) {
  TrainConfig config = offloading();
  change(config);
  EXPECT_NO_THROW(config.validate(1));
}

void expect_refused(const Change& change, const std::string& message) {
  TrainConfig config = offloading();
  change(config);
  EXPECT_THAT([&] { config.validate(1); }, ThrowsMessage<ConfigError>(says(message)));
}

TEST(OffloadConfig, IsOffUntilItIsAskedFor) {
  const TrainConfig config;
  EXPECT_FALSE(config.offload.any());
  OffloadOptions on = config.offload;
  on.params = on.grads = on.optimizer = true;
  EXPECT_EQ(on, OffloadOptions{});
}

TEST(OffloadConfig, FlagsOfEveryKey) {
  TrainConfig config;
  Schema schema = train_schema(config);
  const std::pair<const char*, const char*> flags[] = {
      {"params", "true"},      {"grads", "true"},      {"optimizer", "true"},
      {"param_budget", "1GB"}, {"host_budget", "3GB"}, {"device_limit", "2GB"},
      {"host_limit", "4GB"},   {"prefetch", "3"},      {"async_prefetch", "false"},
      {"pin", "false"},        {"overlap", "false"},   {"codec", "exp_avg=bf16,exp_avg_sq=int8"},
      {"strategy", "extreme"}, {"disk", "/fast"},      {"update_site", "cpu"},
      {"clip_mode", "none"}};
  for (const auto& [key, value] : flags) schema.set_flag(std::string("offload.") + key, value);
  EXPECT_EQ(config.offload,
            (OffloadOptions{.params = true,
                            .grads = true,
                            .optimizer = true,
                            .param_budget = kGB,
                            .host_budget = 3 * kGB,
                            .device_limit = 2 * kGB,
                            .codec = {Codec::bf16, Codec::int8},
                            .disk = "/fast",
                            .advanced = {.host_limit = 4 * kGB,
                                         .prefetch = 3,
                                         .async_prefetch = false,
                                         .overlap = false,
                                         .pin = false,
                                         .strategy = layout::OffloadStrategy::extreme,
                                         .update_site = UpdateSite::cpu,
                                         .clip_mode = ClipMode::none}}));
  EXPECT_EQ(train_config_from_json(to_json(config), "x"), config);
  schema.set_flag("offload.pin", "auto");
  EXPECT_FALSE(config.offload.advanced.pin.has_value());
  // Every name that a choice has is the enum's.
  for (const auto strategy :
       {layout::OffloadStrategy::conservative, layout::OffloadStrategy::balanced,
        layout::OffloadStrategy::aggressive, layout::OffloadStrategy::extreme}) {
    schema.set_flag("offload.strategy", std::string(layout::name_of(strategy)));
    EXPECT_EQ(config.offload.advanced.strategy, strategy);
  }
  for (const auto site : {UpdateSite::automatic, UpdateSite::cpu, UpdateSite::device}) {
    schema.set_flag("offload.update_site", std::string(layout::name_of(site)));
    EXPECT_EQ(config.offload.advanced.update_site, site);
  }
  for (const auto mode : {ClipMode::exact, ClipMode::none}) {
    schema.set_flag("offload.clip_mode", std::string(layout::name_of(mode)));
    EXPECT_EQ(config.offload.advanced.clip_mode, mode);
  }
}

TEST(OffloadConfig, WrongFlags) {
  TrainConfig config;
  Schema schema = train_schema(config);
  EXPECT_THAT([&] { schema.set_flag("offload.codec", "zip"); }, refused("offload.codec: "));
  EXPECT_THAT([&] { schema.set_flag("offload.codec", "zip"); }, refused("'zip'"));
  EXPECT_THAT([&] { schema.set_flag("offload.prefetch", "0"); },
              refused("offload.prefetch is '0' ... whole number ... at least 1"));
  EXPECT_THAT([&] { schema.set_flag("offload.host_budget", "-1"); },
              refused("offload.host_budget is '-1' ... size"));
}

TEST(OffloadConfig, AKeyThatWouldBeOverlookedIsRefused) {
  const struct {
    const char* key;
    Change change;
  } cases[] = {
      {"param_budget", [](auto& c) { c.offload.param_budget = kGB; }},
      {"host_budget", [](auto& c) { c.offload.host_budget = kGB; }},
      {"device_limit", [](auto& c) { c.offload.device_limit = kGB; }},
      {"host_limit", [](auto& c) { c.offload.advanced.host_limit = kGB; }},
      {"prefetch", [](auto& c) { c.offload.advanced.prefetch = 2; }},
      {"async_prefetch", [](auto& c) { c.offload.advanced.async_prefetch = false; }},
      {"pin", [](auto& c) { c.offload.advanced.pin = true; }},
      {"overlap", [](auto& c) { c.offload.advanced.overlap = false; }},
      {"codec", [](auto& c) { c.offload.codec.exp_avg = Codec::bf16; }},
      {"strategy", [](auto& c) { c.offload.advanced.strategy = layout::OffloadStrategy::extreme; }},
      {"disk", [](auto& c) { c.offload.disk = "/fast"; }},
      {"update_site", [](auto& c) { c.offload.advanced.update_site = UpdateSite::cpu; }},
      {"clip_mode", [](auto& c) { c.offload.advanced.clip_mode = ClipMode::none; }}};
  for (const auto& [key, change] : cases) {
    expect_refused(
        [&](auto& c) {
          c.offload.params = c.offload.grads = c.offload.optimizer = false;
          change(c);
        },
        std::string("offload.") + key +
            " is set ... nothing is offloaded ... offload.params, offload.grads or "
            "offload.optimizer");
  }
}

TEST(OffloadConfig, BudgetsAndLimits) {
  expect_valid([](auto&) {});
  expect_valid([](auto& c) { c.offload.device_limit = kGB; });  // the budget follows
  expect_refused(
      [](auto& c) {
        c.offload.param_budget = 3 * kGB;
        c.offload.device_limit = 2 * kGB;
      },
      "offload.param_budget is 3 GB ... at most offload.device_limit, 2 GB");
  expect_refused([](auto& c) { c.offload.host_budget = 65 * kGB; },
                 "offload.host_budget is 65 GB ... at most offload.host_limit, 64 GB");
  expect_refused(
      [](auto& c) {
        c.offload.params = false;
        c.offload.param_budget = kGB;
      },
      "offload.param_budget is set ... offload.params is false");
}

TEST(OffloadConfig, PlansForTheOptimizer) {
  TrainConfig config = offloading();
  EXPECT_EQ(config.offload_options().advanced.update_rule, layout::UpdateRule::adamw);
  config.optim.name = OptimizerKind::sgd;
  EXPECT_EQ(config.offload_options().advanced.update_rule, layout::UpdateRule::sgd);
  config.optim.momentum = 0.9;
  EXPECT_EQ(config.offload_options().advanced.update_rule, layout::UpdateRule::sgd_momentum);
  expect_valid([](auto& c) { c.optim.name = OptimizerKind::sgd; });
  const auto with_codec = [](double momentum) {
    return [=](auto& c) {
      c.optim.name = OptimizerKind::sgd;
      c.optim.momentum = momentum;
      c.offload.codec = {Codec::bf16, Codec::bf16};
    };
  };
  expect_valid(with_codec(0.9));
  expect_refused(with_codec(0),
                 "offload.codec has exp_avg=bf16 and exp_avg_sq=bf16 ... SGD without momentum");
}

TEST(OffloadConfig, MomentsAreFloat32) {
  expect_refused([](auto& c) { c.optim.moments = Precision::bfloat16; },
                 "optim.moments is bfloat16, must be float32 ... offload.optimizer true ... "
                 "offload.codec bf16");
}

TEST(OffloadConfig, UpdatesInBackwardAreNotClipped) {
  expect_refused([](auto& c) { c.offload.advanced.clip_mode = ClipMode::none; },
                 "offload.clip_mode none ... optim.clip 0 ... it is 1");
  expect_valid([](auto& c) {
    c.offload.advanced.clip_mode = ClipMode::none;
    c.optim.clip = 0;
  });
  expect_refused(
      [&](auto& c) {
        c.optim.clip = 0;
        c.offload.advanced.clip_mode = ClipMode::none;
        c.offload.optimizer = false;
      },
      "offload.clip_mode is none ... offload.optimizer is false");
  TrainConfig config = offloading();
  config.optim.clip = 0;
  config.offload.advanced.clip_mode = ClipMode::none;
  config.parallel.tp = 2;
  EXPECT_THAT([&] { config.validate(2); },
              ThrowsMessage<ConfigError>(
                  says("offload.clip_mode is none ... parallel.tp 2 and parallel.pp 1")));
}

TEST(OffloadConfig, KeysOfStateNeedOffloadedState) {
  const auto refused = [](const Change& change, const std::string& message) {
    expect_refused(
        [&](auto& c) {
          c.offload.optimizer = false;
          change(c);
        },
        message);
  };
  refused([](auto& c) { c.offload.advanced.update_site = UpdateSite::cpu; },
          "offload.update_site is set ... offload.optimizer is false");
  refused([](auto& c) { c.offload.codec.exp_avg_sq = Codec::int8; },
          "offload.codec is set ... offload.optimizer is false");
  refused([](auto& c) { c.offload.disk = "/fast"; },
          "offload.disk is set ... offload.optimizer is false");
}

TEST(OffloadConfig, DevicesDoNotDecodeLz4) {
  for (const bool first : {true, false}) {
    const auto change = [&](auto& c) {
      (first ? c.offload.codec.exp_avg : c.offload.codec.exp_avg_sq) = Codec::lossless;
    };
    expect_refused(
        [&](auto& c) {
          change(c);
          c.offload.advanced.update_site = UpdateSite::device;
        },
        std::string("offload.update_site is device, but offload.codec is ") +
            (first ? "exp_avg" : "exp_avg_sq") + "=lossless: LZ4 ... CPU");
    expect_valid(change);
  }
  expect_valid([](auto& c) {
    c.offload.codec = {Codec::int8, Codec::int8};
    c.offload.advanced.update_site = UpdateSite::device;
  });
}

TEST(OffloadConfig, RejectsShardingThatKeepsParametersGathered) {
  for (const auto shard : {layout::ShardingStrategy::no_shard, layout::ShardingStrategy::full_shard,
                           layout::ShardingStrategy::hybrid_shard})
    expect_valid([&](auto& c) { c.parallel.shard = shard; });
  for (const auto shard :
       {layout::ShardingStrategy::shard_grad_op, layout::ShardingStrategy::optimizer}) {
    expect_refused([&](auto& c) { c.parallel.shard = shard; },
                   "parallel.shard is " + std::string(name_of(shard)) +
                       " ... none, full, hybrid ... offloaded");
  }
}

TEST(OffloadConfig, TheDiskMustBeAFolderThatCanBeWritten) {
  const test::TempDir folder;
  TrainConfig config = offloading();
  config.data.path = folder.path() + "/data.txt";
  test::write_file(config.data.path, std::string(20000, 'a'));
  config.checkpoint.dir = "";
  config.offload.disk = folder.path() + "/none";
  EXPECT_THAT([&] { check_inputs(config, 1); },
              ThrowsMessage<ConfigError>(says("offload.disk: " + config.offload.disk +
                                              " ... not a folder ... optimizer")));
  config.offload.disk = config.data.path;
  EXPECT_THAT([&] { check_inputs(config, 1); }, ThrowsMessage<ConfigError>(says("not a folder")));
  config.offload.disk = folder.path();
  EXPECT_NO_THROW(check_inputs(config, 1));
}

}  // namespace
}  // namespace lockstep::config
