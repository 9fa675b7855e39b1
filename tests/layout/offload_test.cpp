// SPDX-License-Identifier: Apache-2.0
#include "lockstep/layout/offload.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>

#include "lockstep/core/error.h"
#include "tests/support/refused.h"

namespace lockstep::layout {
namespace {

using codec::Codec;
using test::refused;
using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr int64_t kGB = int64_t{1} << 30;
constexpr OffloadStrategy kStrategies[] = {OffloadStrategy::conservative, OffloadStrategy::balanced,
                                           OffloadStrategy::aggressive, OffloadStrategy::extreme};

TEST(Offload, Defaults) {
  const OffloadOptions options;
  EXPECT_TRUE(options.params && options.grads && options.optimizer);
  EXPECT_EQ(options.advanced.prefetch, 16);
  EXPECT_TRUE(options.advanced.async_prefetch && options.advanced.overlap);
  EXPECT_FALSE(options.advanced.pin.has_value());
  EXPECT_EQ(options.codec, StateCodecs{});
  EXPECT_EQ(options.advanced.strategy, OffloadStrategy::aggressive);
  EXPECT_EQ(options.disk, "");
  EXPECT_EQ(options.advanced.update_site, UpdateSite::automatic);
  EXPECT_EQ(options.advanced.clip_mode, ClipMode::exact);
  EXPECT_TRUE(options.any());
  EXPECT_FALSE((OffloadOptions{.params = false, .grads = false, .optimizer = false}.any()));
  EXPECT_TRUE((OffloadOptions{.params = false, .grads = true, .optimizer = false}.any()));
}

TEST(Offload, NumbersOfStrategies) {
  const double thresholds[] = {0.90, 0.75, 0.60, 0.40}, aggressive[] = {0.2, 0.5, 0.8, 1.0};
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(threshold(kStrategies[i]), thresholds[i]);
    EXPECT_EQ(aggressiveness(kStrategies[i]), aggressive[i]);
  }
}

TEST(Offload, Names) {
  const char* names[] = {"conservative", "balanced", "aggressive", "extreme"};
  for (size_t i = 0; i < 4; ++i) EXPECT_EQ(name_of(kStrategies[i]), names[i]);
  EXPECT_EQ(name_of(UpdateSite::automatic), "auto");
  EXPECT_EQ(name_of(UpdateSite::cpu), "cpu");
  EXPECT_EQ(name_of(UpdateSite::device), "device");
  EXPECT_EQ(name_of(UpdateRule::adamw), "adamw");
  EXPECT_EQ(name_of(UpdateRule::sgd_momentum), "sgd_momentum");
  EXPECT_EQ(name_of(UpdateRule::sgd), "sgd");
  EXPECT_EQ(name_of(ClipMode::exact), "exact");
  EXPECT_EQ(name_of(ClipMode::none), "none");
}

TEST(Offload, CodecsOfStates) {
  const struct {
    const char* text;
    StateCodecs codecs;
    const char* name;
  } cases[] = {
      {"none", {}, "none"},
      {"bf16", {Codec::bf16, Codec::bf16}, "bf16"},
      {"fp16", {Codec::fp16, Codec::bf16}, "fp16"},
      {"int8", {Codec::int8, Codec::quantization}, "int8"},
      {"exp_avg=int8,exp_avg_sq=int8", {Codec::int8, Codec::int8}, "exp_avg=int8,exp_avg_sq=int8"},
      {"exp_avg=bf16", {Codec::bf16, Codec::none}, "exp_avg=bf16"},
      {"exp_avg_sq=quantization", {Codec::none, Codec::quantization}, "exp_avg_sq=quantization"},
      {"exp_avg_sq=int8,exp_avg=fp16", {Codec::fp16, Codec::int8}, "exp_avg=fp16,exp_avg_sq=int8"},
      {"exp_avg=lossless,exp_avg_sq=lossless", {Codec::lossless, Codec::lossless}, "lossless"},
      {"exp_avg=none,exp_avg_sq=bf16", {Codec::none, Codec::bf16}, "exp_avg_sq=bf16"},
      {"params=int8", {.params = Codec::int8}, "params=int8"},
      {"none,grads=bf16", {.grads = Codec::bf16}, "grads=bf16"},
      {"int8,params=quantization,grads=bf16",
       {Codec::int8, Codec::quantization, Codec::quantization, Codec::bf16},
       "int8,params=quantization,grads=bf16"},
      {"params=lossless,exp_avg=bf16",
       {.exp_avg = Codec::bf16, .params = Codec::lossless},
       "exp_avg=bf16,params=lossless"},
      {"grads=lossless", {.grads = Codec::lossless}, "grads=lossless"}};
  for (const auto& [text, codecs, name] : cases) {
    EXPECT_EQ(parse_state_codecs(text), codecs) << text;
    EXPECT_EQ(name_of(codecs), name);
    EXPECT_EQ(parse_state_codecs(name), codecs) << name;
  }
}

TEST(Offload, WrongCodecsOfStates) {
  EXPECT_THAT([] { parse_state_codecs("zip"); }, refused("'zip' ... none, fp16"));
  EXPECT_THAT([] { parse_state_codecs(""); }, refused("'' is unknown"));
  EXPECT_THAT([] { parse_state_codecs("exp_avg=zip"); }, refused("'zip' is unknown"));
  EXPECT_THAT([] { parse_state_codecs("exp_avg="); }, refused("'' is unknown"));
  EXPECT_THAT([] { parse_state_codecs("momentum=bf16"); },
              refused("[state codecs] ... 'momentum' ... exp_avg, exp_avg_sq, params, grads"));
  EXPECT_THAT([] { parse_state_codecs("bf16,exp_avg=int8"); }, refused("exp_avg is given twice"));
  EXPECT_THAT([] { parse_state_codecs("params=fp16"); },
              refused("params=fp16: must be none, bf16"));
  EXPECT_THAT([] { parse_state_codecs("grads=int8"); },
              refused("grads=int8 ... none, bf16 or lossless"));

  EXPECT_THAT([] { parse_state_codecs("exp_avg=bf16,exp_avg=int8"); },
              refused("[state codecs] 'exp_avg=bf16,exp_avg=int8': exp_avg is given twice"));
  for (const char* text : {"exp_avg=bf16,int8", "exp_avg=bf16,", ",exp_avg=bf16"})
    EXPECT_THAT([&] { parse_state_codecs(text); }, refused("must be KIND=CODEC")) << text;
}

TEST(Offload, CodecsAreForWhatMayLeave) {
  const auto given = [](StateCodecs codecs, auto&& change) {
    OffloadOptions options = resolved({.codec = codecs}, 0, 0);
    change(options);
    return [options] { validate(options); };
  };
  const StateCodecs params{.params = Codec::int8}, grads{.grads = Codec::bf16};
  EXPECT_NO_THROW(given(params, [](auto&) {})());
  EXPECT_NO_THROW(given(grads, [](auto&) {})());
  EXPECT_THAT(given(params, [](auto& options) { options.params = false; }),
              refused("offload.codec has params=int8 ... offload.params is false"));
  EXPECT_THAT(given(grads, [](auto& options) { options.grads = false; }),
              refused("offload.codec has grads=bf16 ... offload.grads is false"));
  EXPECT_THAT(given(grads, [](auto& options) { options.advanced.clip_mode = ClipMode::none; }),
              refused("offload.codec has grads=bf16 ... offload.clip_mode is none"));
  for (const StateCodecs& codecs :
       {StateCodecs{.params = Codec::lossless}, StateCodecs{.grads = Codec::lossless}}) {
    EXPECT_THAT(
        given(codecs, [](auto& options) { options.advanced.update_site = UpdateSite::device; }),
        refused("offload.update_site is device ... offload.codec is " + name_of(codecs) +
                " ... LZ4 ... CPU"));
  }
}

TEST(Offload, CodecsAreForMomentsThatTheOptimizerHas) {
  const auto given = [](UpdateRule rule, const char* codecs) {
    OffloadOptions options = resolved({.codec = parse_state_codecs(codecs)}, 0, 0);
    options.advanced.update_rule = rule;
    return [options] { validate(options); };
  };
  for (const char* codecs : {"none", "bf16", "int8", "lossless", "exp_avg=quantization",
                             "params=int8", "exp_avg=fp16,grads=bf16"}) {
    EXPECT_NO_THROW(given(UpdateRule::sgd_momentum, codecs)()) << codecs;
  }
  EXPECT_NO_THROW(given(UpdateRule::sgd, "params=int8,grads=bf16")());
  EXPECT_THAT(
      given(UpdateRule::sgd_momentum, "exp_avg_sq=bf16"),
      refused("offload.codec has exp_avg=none and exp_avg_sq=bf16 ... SGD ... exp_avg_sq out"));
  EXPECT_THAT(given(UpdateRule::sgd_momentum, "exp_avg=bf16,exp_avg_sq=int8"),
              ThrowsMessage<ConfigError>(HasSubstr("exp_avg=bf16 and exp_avg_sq=int8")));
  EXPECT_THAT(given(UpdateRule::sgd, "quantization"),
              refused("offload.codec has exp_avg=quantization and exp_avg_sq=quantization ... SGD "
                      "without momentum"));
}

TEST(Offload, WhatIsOpenIsTheSmallerOfDefaultAndMachine) {
  OffloadOptions large = resolved({}, 100 * kGB, 200 * kGB);
  EXPECT_EQ(large.param_budget, 2 * kGB);
  EXPECT_EQ(large.host_budget, 32 * kGB);
  EXPECT_EQ(large.device_limit, 8 * kGB);
  EXPECT_EQ(large.advanced.host_limit, 64 * kGB);
  EXPECT_NO_THROW(validate(large));
  EXPECT_EQ(resolved({}, 0, 0), large);  // not known

  const OffloadOptions small = resolved({}, kGB, 20 * kGB);
  EXPECT_EQ(small.param_budget, kGB);
  EXPECT_EQ(small.host_budget, 20 * kGB);
  EXPECT_EQ(small.device_limit, kGB);
  EXPECT_EQ(small.advanced.host_limit, 20 * kGB);
  EXPECT_NO_THROW(validate(small));

  // A budget that is open keeps to a limit that is not, and to the machine.
  const OffloadOptions limited =
      resolved({.device_limit = kGB / 2, .advanced = {.host_limit = 5}}, kGB, kGB);
  EXPECT_EQ(limited.param_budget, kGB / 2);
  EXPECT_EQ(limited.host_budget, 5);
  const OffloadOptions loose =
      resolved({.device_limit = 9 * kGB, .advanced = {.host_limit = 9 * kGB}}, kGB, kGB);
  EXPECT_EQ(loose.device_limit, 9 * kGB);
  EXPECT_EQ(loose.param_budget, kGB);
  EXPECT_EQ(loose.host_budget, kGB);

  // What is given stays.
  const OffloadOptions given{
      .param_budget = 1, .host_budget = 2, .device_limit = 3, .advanced = {.host_limit = 4}};
  EXPECT_EQ(resolved(given, kGB, kGB), given);
}

TEST(Offload, RejectsBadOptions) {
  const OffloadOptions right = resolved({}, 0, 0);
  const struct {
    int64_t& (*member)(OffloadOptions& options);
    const char* name;
  } sizes[] = {
      {[](OffloadOptions& each) -> int64_t& { return each.param_budget; }, "param_budget"},
      {[](OffloadOptions& each) -> int64_t& { return each.host_budget; }, "host_budget"},
      {[](OffloadOptions& each) -> int64_t& { return each.device_limit; }, "device_limit"},
      {[](OffloadOptions& each) -> int64_t& { return each.advanced.host_limit; }, "host_limit"}};
  for (const auto& [member, name] : sizes) {
    OffloadOptions wrong = right;
    member(wrong) = 0;
    EXPECT_THAT([&] { validate(wrong); },
                refused("offload." + std::string(name) + " is 0 B, must be above 0"));
    member(wrong) = -2 * kGB;
    EXPECT_THAT([&] { validate(wrong); },
                refused("offload." + std::string(name) + " is -2 GB, must be above 0"));
  }
  for (const int depth : {0, -3}) {
    OffloadOptions wrong = right;
    wrong.advanced.prefetch = depth;
    EXPECT_THAT([&] { validate(wrong); },
                refused("offload.prefetch is " + std::to_string(depth) + " ... at least 1"));
  }
  OffloadOptions one = right;
  one.advanced.prefetch = 1;
  EXPECT_NO_THROW(validate(one));
}

TEST(Offload, BudgetsAreWithinTheLimits) {
  OffloadOptions options = resolved({}, 0, 0);
  options.param_budget = 3 * kGB;
  options.device_limit = 2 * kGB;
  EXPECT_THAT([&] { validate(options); },
              refused("offload.param_budget is 3 GB ... at most offload.device_limit, 2 GB"));
  options.param_budget = 2 * kGB;
  EXPECT_NO_THROW(validate(options));
  options.param_budget = 2 * kGB + 1;  // numbers that would look the same
  EXPECT_THAT(
      [&] { validate(options); },
      refused(
          "offload.param_budget is 2147483649 B ... at most offload.device_limit, 2147483648 B"));
  options = resolved({.host_budget = 96 * kGB}, 0, 0);
  EXPECT_THAT([&] { validate(options); },
              refused("offload.host_budget is 96 GB ... at most offload.host_limit, 64 GB"));
}

TEST(Offload, EncodedStateIsSmaller) {
  EXPECT_EQ(effective_budget(32 * kGB, 1), 32 * kGB);
  EXPECT_EQ(effective_budget(32 * kGB, 0.5), 64 * kGB);
  EXPECT_EQ(effective_budget(10, 0.3), 33);
  EXPECT_EQ(effective_budget(std::numeric_limits<int64_t>::max(), 0.25),
            std::numeric_limits<int64_t>::max());
}

}  // namespace
}  // namespace lockstep::layout
