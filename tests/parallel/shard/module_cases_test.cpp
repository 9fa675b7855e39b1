// SPDX-License-Identifier: Apache-2.0
// Every module case computes the same when its parameters are gathered and released.
#include <gtest/gtest.h>

#include <chrono>

#include "tests/parallel/shard/module_cases.h"

namespace lockstep::test {
namespace {

using parallel::BySize;
using parallel::FullyShardOptions;
using parallel::OneUnit;
using parallel::Prefetch;

std::vector<Sharding> shardings() {
  const auto ahead = [](Prefetch when, int depth) {
    FullyShardOptions options = shard_all();
    options.advanced.forward_prefetch = options.advanced.backward_prefetch = when;
    options.advanced.prefetch_depth = depth;
    return options;
  };
  FullyShardOptions orig = shard_all(OneUnit{}), kept = shard_all(), some = shard_all();
  orig.use_orig_params = true;
  kept.strategy = parallel::ShardingStrategy::shard_grad_op;
  some.min_num_params = 12;  // small tensors are whole
  return {{"drop", shard_all(), true, 2},
          {"drop_orig", orig, true, 2},
          {"drop_some", some, true, 2},
          {"one_unit", shard_all(OneUnit{}), false, 2},
          {"learned", shard_all()},
          {"post", ahead(Prefetch::post, 1)},
          {"none", ahead(Prefetch::none, 1)},
          {"depth0", ahead(Prefetch::pre, 0)},
          {"depth3", ahead(Prefetch::pre, 3)},
          {"post3", ahead(Prefetch::post, 3)},
          {"grad_op", kept},
          {"gloo", shard_all(), true, 2, "gloo"},  // nobody can look into another's memory
          {"gloo_learned", ahead(Prefetch::pre, 2), false, 3, "gloo"}};
}

class ModuleCases : public testing::TestWithParam<ModuleCase> {};

TEST_P(ModuleCases, TheSameBitsAsThePlainModule) {
  for (const Sharding& sharding : shardings()) {
    SCOPED_TRACE(sharding.name);
    EXPECT_NO_THROW(comm::run_threads(
        2, [&](const comm::Group& group) { compare(GetParam(), sharding, group); },
        {.backend = sharding.backend, .timeout = std::chrono::seconds(20)}));
  }
}

// Shares of different sizes, and ranks without any.
TEST_P(ModuleCases, TheSameBitsOnFourRanks) {
  EXPECT_NO_THROW(comm::run_threads(4, [&](const comm::Group& group) {
    compare(GetParam(), {"drop", shard_all(), true, 2}, group);
  }));
}

INSTANTIATE_TEST_SUITE_P(Modules, ModuleCases, testing::ValuesIn(module_cases()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace lockstep::test
