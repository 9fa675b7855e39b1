// SPDX-License-Identifier: Apache-2.0
// What leaves the device between its uses, where it goes, and how much may be where.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "lockstep/codec/codec.h"

namespace lockstep::layout {

// Offloading starts where what is wanted on the device exceeds threshold x device_limit; then only
// threshold x (1 - aggressiveness) x device_limit is filled with what could go.
enum class OffloadStrategy { conservative, balanced, aggressive, extreme };
std::string_view name_of(OffloadStrategy strategy);
double threshold(OffloadStrategy strategy);       // 0.90 0.75 0.60 0.40
double aggressiveness(OffloadStrategy strategy);  // 0.2 0.5 0.8 1.0

// Where the optimizer computes. automatic: where a short measurement finds it faster.
enum class UpdateSite { automatic, cpu, device };
// exact: gradients are clipped by the norm of all of them, as without offload. none: they are not
// clipped, and each parameter is updated during backward, as soon as it has its gradient.
enum class ClipMode { exact, none };
// The optimizer that will update the model: what its state is, and so what there is to place.
enum class UpdateRule { adamw, sgd_momentum, sgd };
int num_moments(UpdateRule rule);  // 2 1 0
std::string_view name_of(UpdateRule rule);
std::string_view name_of(UpdateSite site);
std::string_view name_of(ClipMode mode);

// How each kind is kept where it rests. "quantization" means both moments, "fp16" and "int8" the
// first, with bf16 and quantization for the second, whose small values they would make zero;
// "exp_avg=bf16,exp_avg_sq=quantization,params=int8,grads=bf16" is each by itself, what is not
// named as it is; "quantization,params=int8" both moments and the parameters. The momentum_buffer
// of SGD is a first moment.
struct StateCodecs {
  codec::Codec exp_avg = codec::Codec::none;
  codec::Codec exp_avg_sq = codec::Codec::none;
  // On the host. Not fp16. bf16, int8, quantization: the model computes with what they keep of a
  // float32 master, and a byte for each element keeps most of the rest, so that updates add up.
  codec::Codec params = codec::Codec::none;
  codec::Codec grads = codec::Codec::none;  // on the host: none, bf16 or lossless

  bool has_moments() const {
    return exp_avg != codec::Codec::none || exp_avg_sq != codec::Codec::none;
  }
  // LZ4 is decoded by the CPU.
  bool is_lossless() const {
    return exp_avg == codec::Codec::lossless || exp_avg_sq == codec::Codec::lossless ||
           params == codec::Codec::lossless || grads == codec::Codec::lossless;
  }
  bool operator==(const StateCodecs&) const = default;
};
std::string name_of(const StateCodecs& codecs);
StateCodecs parse_state_codecs(std::string_view text);

struct OffloadAdvancedOptions {
  int64_t host_limit = 0;  // bytes; everything of Lockstep's in host memory. 0: as for budgets
  int prefetch = 16;       // parameters ahead
  bool async_prefetch = true;
  bool overlap = true;                     // transfers and updates overlap with the computation
  std::optional<bool> pin = std::nullopt;  // not set: where there is a device that copies
  OffloadStrategy strategy = OffloadStrategy::aggressive;
  UpdateRule update_rule = UpdateRule::adamw;
  UpdateSite update_site = UpdateSite::automatic;
  ClipMode clip_mode = ClipMode::exact;
  bool operator==(const OffloadAdvancedOptions&) const = default;
};

struct OffloadOptions {
  bool params = true, grads = true, optimizer = true;
  // Bytes. 0: the smaller of a default (2 GB, 32 GB, 8 GB; 64 GB for the host's limit) and what the
  // machine has.
  int64_t param_budget = 0;  // parameters on the device
  int64_t host_budget = 0;   // what is offloaded to host memory
  int64_t device_limit = 0;  // everything of Lockstep's on the device
  StateCodecs codec = {};
  std::string disk = {};  // a folder, for what exceeds the host budget; empty: none
  OffloadAdvancedOptions advanced = {};

  bool any() const { return params || grads || optimizer; }
  // "offload parameters and optimizer state, aggressive; device parameters 2 GB of limit 8 GB, host
  // auto of limit auto, no disk; codec none; ..." in one line. auto: filled in by resolved().
  std::string describe() const;
  bool operator==(const OffloadOptions&) const = default;
};

// The options with budgets and limits that were left open filled in: a limit with the smaller of
// its default and what the machine has (`device_bytes`, `host_bytes`; 0: not known), a budget with
// the smallest of its default, that and its limit.
OffloadOptions resolved(OffloadOptions options, int64_t device_bytes, int64_t host_bytes);
// What each of `models` offloaded models of one rank (a pipeline's chunks) may take: budgets and
// limits, which resolved() has filled in, are the rank's, and are divided.
OffloadOptions divided(OffloadOptions options, int models);
// ConfigError, with both numbers, for the first rule that is broken: budgets, limits and prefetch
// above 0, budgets within the limits, and codecs of what may leave only and of what the optimizer
// has. For options that resolved() has filled in.
void validate(const OffloadOptions& options);

// How many bytes of state the host budget holds, once encoded to `ratio` of their size.
int64_t effective_budget(int64_t budget, double ratio);

}  // namespace lockstep::layout
