// SPDX-License-Identifier: Apache-2.0
#include "lockstep/parallel/shard/options.h"

#include <array>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::parallel {
namespace {

template <class Value, size_t kCount>
Value parse(std::string_view what, std::string_view name,
            const std::array<std::pair<std::string_view, Value>, kCount>& known) {
  std::vector<std::string_view> names;
  for (const auto& [each, value] : known) {
    if (each == name) return value;
    names.push_back(each);
  }
  throw ConfigError(
      format("[fully_shard] {} '{}' is unknown, must be one of {}", what, name, join(names)));
}

void require_floating(const char* what, const std::optional<at::ScalarType>& dtype) {
  if (!dtype) return;
  for (const auto known : {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16}) {
    if (*dtype == known) return;
  }
  throw ConfigError(format(
      "[fully_shard] mixed_precision.{} is {}, must be float64, float32, float16 or bfloat16", what,
      c10::toString(*dtype)));
}

}  // namespace

at::ScalarType parse_dtype(std::string_view name) {
  return parse("dtype", name,
               std::array<std::pair<std::string_view, at::ScalarType>, 6>{{
                   {"float64", at::kDouble},
                   {"float32", at::kFloat},
                   {"float16", at::kHalf},
                   {"bfloat16", at::kBFloat16},
                   {"fp16", at::kHalf},
                   {"bf16", at::kBFloat16},
               }});
}

void validate(const FullyShardOptions& options) {
  if (options.min_num_params < 1) {
    throw ConfigError(
        format("[fully_shard] min_num_params is {}, must be at least 1", options.min_num_params));
  }
  if (const auto* by_size = std::get_if<BySize>(&options.units);
      by_size != nullptr && by_size->min_num_params < 1) {
    throw ConfigError(
        format("[fully_shard] units by size: min_num_params is {}, must be at least 1",
               by_size->min_num_params));
  }
  if (const auto* by_type = std::get_if<ByType>(&options.units);
      by_type != nullptr && by_type->names.empty()) {
    throw ConfigError("[fully_shard] units by type: there are no names, must be at least 1");
  }
  if (const auto* predicate = std::get_if<ByPredicate>(&options.units);
      predicate != nullptr && !*predicate) {
    throw ConfigError("[fully_shard] units by predicate: it is empty, must be callable");
  }
  if (options.advanced.prefetch_depth < 0) {
    throw ConfigError(format("[fully_shard] prefetch_depth is {}, must be at least 0",
                             options.advanced.prefetch_depth));
  }
  if (options.advanced.granularity == ShardGranularity::tensors &&
      options.strategy == ShardingStrategy::no_shard) {
    throw ConfigError(
        "[fully_shard] advanced.granularity is tensors, but the strategy is none, with which ranks "
        "share nothing; use optimizer, full, grad_op or hybrid, or the granularity rows");
  }
  if (!options.advanced.first_tensors.empty() &&
      options.advanced.granularity != ShardGranularity::tensors) {
    throw ConfigError(
        format("[fully_shard] advanced.first_tensors has {} names, but advanced.granularity is {}; "
               "they are for tensors",
               options.advanced.first_tensors.size(), name_of(options.advanced.granularity)));
  }
  const bool tiers = std::holds_alternative<layout::OffloadOptions>(options.offload);
  if (tiers && (options.strategy == ShardingStrategy::shard_grad_op ||
                options.strategy == ShardingStrategy::optimizer)) {
    throw ConfigError(
        format("[fully_shard] offload with the strategy {}; it is for full, hybrid and "
               "none, where parameters need not stay gathered",
               name_of(options.strategy)));
  }
  if (tiers && options.advanced.keep_gathered_on_host) {
    throw ConfigError(
        "[fully_shard] offload and advanced.keep_gathered_on_host are both set; offload decides "
        "what "
        "the host keeps, so give it alone");
  }
  require_floating("param", options.mixed_precision.param);
  require_floating("reduce", options.mixed_precision.reduce);
  require_floating("buffer", options.mixed_precision.buffer);
  if (options.reproducible && options.no_sync == NoSyncGradients::sharded) {
    throw ConfigError(
        "[fully_shard] reproducible and no_sync = sharded are both set; the tree of sums needs the "
        "unreduced gradients, so give one of them");
  }
}

}  // namespace lockstep::parallel
