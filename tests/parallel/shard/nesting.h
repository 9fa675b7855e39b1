// SPDX-License-Identifier: Apache-2.0
// What the tests of nested models share.
#pragma once

#include <chrono>
#include <string>

#include "tests/parallel/shard/pair.h"
#include "tests/parallel/shard/support.h"

namespace lockstep::test::nesting {

inline constexpr auto kDeadline = std::chrono::seconds(20);
inline const comm::InitOptions kThreads{.backend = "thread", .timeout = kDeadline};

inline parallel::FullyShardOptions one_unit(Strategy strategy = Strategy::full_shard) {
  return {.strategy = strategy, .units = parallel::OneUnit{}, .min_num_params = 100};
}

inline torch::nn::Module& child(torch::nn::Module& model, const std::string& name) {
  return *model.named_modules()[name];
}

}  // namespace lockstep::test::nesting
