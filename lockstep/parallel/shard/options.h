// SPDX-License-Identifier: Apache-2.0
// How a model is sharded.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "lockstep/core/torch_fwd.h"
#include "lockstep/layout/offload.h"
#include "lockstep/layout/parallel_config.h"
#include "lockstep/parallel/data/gradient_hook.h"

namespace lockstep::parallel {

// hybrid_shard over a mesh of two axes shards along the second and copies along the first.
using ShardingStrategy = layout::ShardingStrategy;
using ShardGranularity = layout::ShardGranularity;

// Which modules become units, whose parameters are gathered and reduced together. What is in no
// unit of its own belongs to the nearest one above, at last to the model. A parameter that several
// modules share belongs to the first.
struct BySize {
  int64_t min_num_params = 1000;  // in a module, without what is in units inside it
};
struct ByType {
  std::vector<std::string> names;  // "Block", "BlockImpl" or "mine::BlockImpl"
};
using ByPredicate = std::function<bool(const std::string& path, torch::nn::Module& module)>;
struct OneUnit {};
using UnitPolicy = std::variant<BySize, ByType, ByPredicate, OneUnit>;

// float64, float32, float16, bfloat16; nothing: that of the parameter.
struct MixedPrecision {
  std::optional<at::ScalarType> param = std::nullopt;  // gathered and computed in
  std::optional<at::ScalarType> reduce =
      std::nullopt;  // gradients travel in; param's, if not given
  std::optional<at::ScalarType> buffer = std::nullopt;  // floating-point buffers become
  // Gradients of shards stay in the reduce type instead of becoming the shard's.
  bool keep_low_precision_grads = false;
};
// "float32", "bf16", "bfloat16" ...; a ConfigError lists them.
at::ScalarType parse_dtype(std::string_view name);

// When the next unit is gathered: as the running one begins, as it ends, or when it is needed.
enum class Prefetch { pre, post, none };

// What a backward under no_sync() leaves behind.
enum class NoSyncGradients {
  unreduced,  // whole gradients of this rank: no communication, memory of a whole model
  sharded     // reduced as always: memory of a shard
};

// What leaves the device between its uses.
struct NoOffload {};
// Shards, their gradients and the optimizer, which may be any, stay in host memory.
struct HostOffload {};
// OffloadOptions: parameters, gradients and optimizer state, to host memory and disk, within
// budgets, with OffloadedAdamW or OffloadedSGD: parallel/offload/offload.h.
using Offload = std::variant<NoOffload, HostOffload, layout::OffloadOptions>;

struct FullyShardAdvancedOptions {
  // hybrid_shard over a group that is no mesh of two axes: neighbouring ranks that share parameters
  // out among them. Divides the group's size. 0: the ranks of a host.
  int hybrid_group_size = 0;
  Prefetch forward_prefetch = Prefetch::pre;
  Prefetch backward_prefetch = Prefetch::pre;
  int prefetch_depth = 1;  // units ahead
  // At most prefetch_depth gathered units in addition to the running one. Off: those that were
  // fetched and not used are kept until the pass ends.
  bool limit_all_gathers = true;
  // What was gathered is kept in host memory until the next step.
  bool keep_gathered_on_host = false;
  // tensors: tensor i of those that are sharded, in the order of model.named_parameters(), belongs
  // wholly to rank i % ranks that share; trained and frozen ones are counted each by themselves.
  // For optimizers that need whole matrices, with use_orig_params.
  ShardGranularity granularity = ShardGranularity::rows;
  // With tensors: names of parameters, or of modules with all their parameters, that have the
  // indices 0, 1, ... whether or not the model has them. Models that have the same parameter (tied
  // stages of a pipeline) get one owner for it.
  std::vector<std::string> first_tensors = {};
  GradientObserver observe = {};  // empty: none
};

struct FullyShardOptions {
  ShardingStrategy strategy = ShardingStrategy::full_shard;
  UnitPolicy units = BySize{};
  // Smaller tensors stay whole; at least 1.
  int64_t min_num_params = layout::kMinShardedElements;
  MixedPrecision mixed_precision = {};
  // The optimizer sees a shard for each parameter, under its name, instead of one for each unit.
  bool use_orig_params = false;
  Offload offload = NoOffload{};
  NoSyncGradients no_sync = NoSyncGradients::unreduced;
  // Sum (rank, micro-batch) as one fixed binary tree, as DdpOptions::reproducible does.
  bool reproducible = false;
  FullyShardAdvancedOptions advanced = {};
};

// ConfigError for what no model and no group could make right.
void validate(const FullyShardOptions& options);

}  // namespace lockstep::parallel
