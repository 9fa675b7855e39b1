// SPDX-License-Identifier: Apache-2.0
#include "lockstep/layout/offload.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/size_text.h"
#include "lockstep/layout/enum_names.h"

namespace lockstep::layout {
namespace {

using Name = std::string_view;
constexpr std::array<Name, 4> kStrategies = {"conservative", "balanced", "aggressive", "extreme"};
constexpr std::array<double, 4> kThresholds = {0.90, 0.75, 0.60, 0.40};
constexpr std::array<double, 4> kAggressiveness = {0.2, 0.5, 0.8, 1.0};
constexpr std::array<Name, 3> kRules = {"adamw", "sgd_momentum", "sgd"};
constexpr std::array<Name, 3> kSites = {"auto", "cpu", "device"};
constexpr std::array<Name, 2> kClipModes = {"exact", "none"};
constexpr std::array<Name, 4> kStateKinds = {"exp_avg", "exp_avg_sq", "params", "grads"};

constexpr int64_t kGigabyte = int64_t{1} << 30;
constexpr int64_t kParamBudget = 2 * kGigabyte, kHostBudget = 32 * kGigabyte;
constexpr int64_t kDeviceLimit = 8 * kGigabyte, kHostLimit = 64 * kGigabyte;

// The smallest of those that are known.
int64_t smallest(std::initializer_list<int64_t> numbers) {
  int64_t least = std::numeric_limits<int64_t>::max();
  for (const int64_t number : numbers)
    if (number > 0) least = std::min(least, number);
  return least;
}

void require_within(const char* budget, int64_t bytes, const char* limit, int64_t most) {
  if (bytes <= most) return;
  const auto exact = [](int64_t number) { return format("{} B", number); };
  const bool alike = size_text(bytes) == size_text(most);
  throw ConfigError(format("offload.{} is {}, must be at most offload.{}, {}", budget,
                           alike ? exact(bytes) : size_text(bytes), limit,
                           alike ? exact(most) : size_text(most)));
}

}  // namespace

Name name_of(OffloadStrategy strategy) { return enum_name(kStrategies, strategy); }
Name name_of(UpdateRule rule) { return enum_name(kRules, rule); }
Name name_of(UpdateSite site) { return enum_name(kSites, site); }
Name name_of(ClipMode mode) { return enum_name(kClipModes, mode); }

int num_moments(UpdateRule rule) {
  return rule == UpdateRule::adamw ? 2 : rule == UpdateRule::sgd_momentum ? 1 : 0;
}

double threshold(OffloadStrategy strategy) { return kThresholds.at(static_cast<size_t>(strategy)); }
double aggressiveness(OffloadStrategy strategy) {
  return kAggressiveness.at(static_cast<size_t>(strategy));
}

namespace {

codec::Codec& codec_of(StateCodecs& codecs, size_t kind) {
  return kind == 0   ? codecs.exp_avg
         : kind == 1 ? codecs.exp_avg_sq
         : kind == 2 ? codecs.params
                     : codecs.grads;
}

// One codec for both moments.
void set_moments(StateCodecs& codecs, codec::Codec both) {
  codecs.exp_avg = codecs.exp_avg_sq = both;
  // The smallest second moments are zero in these, and what is divided by them is then lost.
  if (both == codec::Codec::fp16) codecs.exp_avg_sq = codec::Codec::bf16;
  if (both == codec::Codec::int8) codecs.exp_avg_sq = codec::Codec::quantization;
}

void require_kind_has(Name kind, codec::Codec codec) {
  if (kind == "params" && codec == codec::Codec::fp16) {
    throw ConfigError(
        "[state codecs] params=fp16: must be none, bf16, int8, quantization or lossless");
  }
  if (kind == "grads" && codec::is_lossy(codec) && codec != codec::Codec::bf16) {
    throw ConfigError(
        format("[state codecs] grads={}: must be none, bf16 or lossless; what is smaller would "
               "lose small gradients",
               codec::name_of(codec)));
  }
}

}  // namespace

std::string name_of(const StateCodecs& codecs) {
  StateCodecs rest = codecs, moments;
  set_moments(moments, codecs.exp_avg);
  std::vector<std::string> parts;
  const bool as_one =
      moments.exp_avg_sq == codecs.exp_avg_sq && codecs.exp_avg != codec::Codec::none;
  if (as_one) {
    parts.emplace_back(codec::name_of(codecs.exp_avg));
    rest.exp_avg = rest.exp_avg_sq = codec::Codec::none;
  }
  for (size_t kind = 0; kind < kStateKinds.size(); ++kind) {
    const codec::Codec codec = codec_of(rest, kind);
    if (codec != codec::Codec::none)
      parts.push_back(format("{}={}", kStateKinds[kind], codec::name_of(codec)));
  }
  return parts.empty() ? "none" : join(parts, ",");
}

std::string OffloadOptions::describe() const {
  std::vector<std::string> kinds;
  if (params) kinds.emplace_back("parameters");
  if (grads) kinds.emplace_back("gradients");
  if (optimizer) kinds.emplace_back("optimizer state");
  if (kinds.empty()) return "offload nothing";
  const auto bytes = [](int64_t number) { return number == 0 ? "auto" : size_text(number); };
  const auto on = [](bool is_on) { return is_on ? "on" : "off"; };
  return format(
      "offload {}, {}; device parameters {} of limit {}, host {} of limit {}, {}; codec {}; "
      "prefetch {} parameters{}, overlap {}, pin {}; update site {}, clip mode {}",
      join(kinds), name_of(advanced.strategy), bytes(param_budget), bytes(device_limit),
      bytes(host_budget), bytes(advanced.host_limit), disk.empty() ? "no disk" : "disk " + disk,
      name_of(codec), advanced.prefetch, advanced.async_prefetch ? " asynchronously" : "",
      on(advanced.overlap), advanced.pin ? on(*advanced.pin) : "auto",
      name_of(advanced.update_site), name_of(advanced.clip_mode));
}

StateCodecs parse_state_codecs(Name text) {
  StateCodecs codecs;
  std::array<bool, kStateKinds.size()> seen{};
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    const Name part = text.substr(begin, end - begin);
    const size_t equals = part.find('=');
    const bool first = begin == 0 && (end == text.size() || !part.empty());
    if (equals == Name::npos && first) {
      set_moments(codecs, codec::parse_codec(part));
      seen[0] = seen[1] = true;
    } else if (equals == Name::npos) {
      throw ConfigError(
          format("[state codecs] '{}' in '{}' must be KIND=CODEC, where KIND is one "
                 "of {}",
                 part, text, join(kStateKinds)));
    } else {
      const auto kind = parse_enum<size_t>("state codecs", kStateKinds, part.substr(0, equals));
      if (seen[kind]) {
        throw ConfigError(
            format("[state codecs] '{}': {} is given twice", text, kStateKinds[kind]));
      }
      seen[kind] = true;
      const auto codec = codec::parse_codec(part.substr(equals + 1));
      require_kind_has(kStateKinds[kind], codec);
      codec_of(codecs, kind) = codec;
    }
    begin = end + 1;
  }
  return codecs;
}

OffloadOptions resolved(OffloadOptions options, int64_t device_bytes, int64_t host_bytes) {
  const auto fill = [](int64_t& value, std::initializer_list<int64_t> bounds) {
    if (value == 0) value = smallest(bounds);
  };
  fill(options.device_limit, {kDeviceLimit, device_bytes});
  fill(options.advanced.host_limit, {kHostLimit, host_bytes});
  fill(options.param_budget, {kParamBudget, options.device_limit, device_bytes});
  fill(options.host_budget, {kHostBudget, options.advanced.host_limit, host_bytes});
  return options;
}

OffloadOptions divided(OffloadOptions options, int models) {
  check(models > 0, "a rank has at least one model");
  for (int64_t* bytes : {&options.param_budget, &options.host_budget, &options.device_limit,
                         &options.advanced.host_limit}) {
    check(*bytes > 0, "a budget that is left open cannot be divided");
    *bytes = std::max<int64_t>(1, *bytes / models);
  }
  return options;
}

namespace {

// One codec for both moments is the first's where there is only one.
void require_moments_for(const StateCodecs& codecs, UpdateRule rule) {
  StateCodecs both;
  set_moments(both, codecs.exp_avg);
  const bool second =
      codecs.exp_avg_sq != codec::Codec::none && codecs.exp_avg_sq != both.exp_avg_sq;
  const int moments = num_moments(rule);
  if (moments == 2 || !codecs.has_moments() || (moments == 1 && !second)) return;
  throw ConfigError(
      format("offload.codec has exp_avg={} and exp_avg_sq={}, but the optimizer is {}",
             codec::name_of(codecs.exp_avg), codec::name_of(codecs.exp_avg_sq),
             moments == 0 ? "SGD without momentum, which has no moments: leave both out"
                          : "SGD, which has no second moment: leave exp_avg_sq out"));
}

void validate_codecs(const OffloadOptions& options) {
  const StateCodecs& codecs = options.codec;
  require_moments_for(codecs, options.advanced.update_rule);
  const auto require_switch = [&](size_t kind, bool on) {
    StateCodecs copy = codecs;
    const codec::Codec codec = codec_of(copy, kind);
    require_kind_has(kStateKinds[kind], codec);
    if (codec == codec::Codec::none || on) return;
    throw ConfigError(
        format("offload.codec has {}={}, but offload.{} is false: they stay on the "
               "device as they are",
               kStateKinds[kind], codec::name_of(codec), kStateKinds[kind]));
  };
  require_switch(2, options.params);
  require_switch(3, options.grads);
  if (codecs.grads != codec::Codec::none && options.advanced.clip_mode == ClipMode::none) {
    throw ConfigError(
        format("offload.codec has grads={}, but offload.clip_mode is none: gradients are used at "
               "once and not kept",
               codec::name_of(codecs.grads)));
  }
  if (codecs.is_lossless() && options.advanced.update_site == UpdateSite::device) {
    throw ConfigError(
        format("offload.update_site is device, but offload.codec is {}: LZ4 is decoded by the CPU",
               name_of(codecs)));
  }
}

}  // namespace

void validate(const OffloadOptions& options) {
  const auto require_positive = [](const char* name, int64_t bytes) {
    if (bytes <= 0) {
      throw ConfigError(format("offload.{} is {}, must be above 0", name, size_text(bytes)));
    }
  };
  require_positive("param_budget", options.param_budget);
  require_positive("host_budget", options.host_budget);
  require_positive("device_limit", options.device_limit);
  require_positive("host_limit", options.advanced.host_limit);
  if (options.advanced.prefetch < 1)
    throw ConfigError(
        format("offload.prefetch is {}, must be at least 1", options.advanced.prefetch));
  require_within("param_budget", options.param_budget, "device_limit", options.device_limit);
  require_within("host_budget", options.host_budget, "host_limit", options.advanced.host_limit);
  validate_codecs(options);
}

int64_t effective_budget(int64_t budget, double ratio) {
  check(ratio > 0, "an encoded size is above 0");
  const double bytes = std::floor(static_cast<double>(budget) / ratio);
  // The largest double below 2^63.
  return bytes >= 0x1p63 ? std::numeric_limits<int64_t>::max() : static_cast<int64_t>(bytes);
}

}  // namespace lockstep::layout
