// SPDX-License-Identifier: Apache-2.0
// What fully_shard refuses.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include <memory>
#include <optional>

#include "lockstep/comm/collectives.h"
#include "tests/parallel/shard/support.h"
#include "tests/support/says.h"

namespace lockstep::test {
namespace {

using parallel::fully_shard;
using parallel::FullyShardOptions;
using parallel::ShardedModel;
using testing::AllOf;
using testing::Each;
using testing::HasSubstr;
using testing::IsEmpty;

// ---- sharding ----

TEST(Sharding, ShardingAModelTwiceIsRefused) {
  for (const Strategy strategy :
       {Strategy::full_shard, Strategy::shard_grad_op, Strategy::optimizer, Strategy::no_shard}) {
    SCOPED_TRACE(name_of(strategy));
    EXPECT_THAT(errors_of(2,
                          [&](const comm::Group& group) {
                            Layers model;
                            const auto first = fully_shard(*model, group, weights_only(strategy));
                            const auto second = fully_shard(*model, group, weights_only(strategy));
                          }),
                Each(says("parameter layer0.weight ... already part")));
  }
}

TEST(Sharding, RejectsModelsThatDifferBetweenRanks) {
  EXPECT_THAT(errors_of(3,
                        [](const comm::Group& group) {
                          Layers model(group.rank() == 1 ? 3 : 4);
                          fully_shard(model, group);
                        }),
              Each(Not(IsEmpty())));
  EXPECT_THAT(errors_of(2,
                        [](const comm::Group& group) {
                          torch::nn::Linear model(64, group.rank() == 0 ? 64 : 65);
                          fully_shard(*model, group);
                        }),
              Each(AllOf(HasSubstr("weight Float[64, 64] on rank 0"),
                         HasSubstr("weight Float[65, 64] on rank 1"))));
  EXPECT_THAT(errors_of(2,
                        [](const comm::Group& group) {
                          auto model = parallel::deferred([&] {
                            return torch::nn::Linear(256, group.rank() == 0 ? 256 : 258);
                          });
                          parallel::fully_shard(model, mesh::Mesh::linear(group, "dp"));
                        }),
              Each(AllOf(HasSubstr("weight Float[256, 256] on rank 0"),
                         HasSubstr("weight Float[258, 256] on rank 1"))));
}

TEST(Sharding, RejectsBadOptions) {
  const auto refusal = [](FullyShardOptions options, int ranks = 2) {
    std::string message;
    const auto errors = errors_of(ranks, [&](const comm::Group& group) {
      Layers model;
      try {
        fully_shard(*model, group, options);
      } catch (const ConfigError&) {
        EXPECT_FALSE(model->parameters()[0].sum().isnan().item<bool>()) << "the model is whole";
        throw;
      }
    });
    EXPECT_THAT(errors, Each(errors[0]));
    return errors[0];
  };
  EXPECT_THAT(refusal({.min_num_params = 0}), says("min_num_params is 0 ... at least 1"));
  EXPECT_THAT(refusal({.min_num_params = -1}), HasSubstr("min_num_params is -1"));
  EXPECT_THAT(refusal({.units = parallel::BySize{0}}),
              HasSubstr("units by size: min_num_params is 0"));
  EXPECT_THAT(refusal({.units = parallel::ByType{}}), says("no names"));
  EXPECT_THAT(refusal({.units = parallel::ByType{{"Linear", "Conv2d"}}}),
              AllOf(says("no module ... 'Conv2d'"), HasSubstr("LinearImpl")));
  EXPECT_THAT(refusal({.units = parallel::ByPredicate()}), HasSubstr("must be callable"));
  EXPECT_THAT(refusal({.advanced = {.prefetch_depth = -1}}), HasSubstr("prefetch_depth is -1"));
  EXPECT_THAT(refusal({.mixed_precision = {.param = at::kInt}}),
              HasSubstr("mixed_precision.param is Int"));
  EXPECT_THAT(refusal({.mixed_precision = {.reduce = at::kLong}}),
              HasSubstr("mixed_precision.reduce is Long"));
  EXPECT_THAT(refusal({.mixed_precision = {.buffer = at::kBool}}),
              HasSubstr("mixed_precision.buffer is Bool"));
  EXPECT_THAT(refusal({.no_sync = parallel::NoSyncGradients::sharded, .reproducible = true}),
              HasSubstr("reproducible and no_sync = sharded"));
  EXPECT_THAT(
      refusal({.strategy = Strategy::hybrid_shard, .advanced = {.hybrid_group_size = 2}}, 3),
      AllOf(HasSubstr("over 3 ranks"), HasSubstr("hybrid_group_size 2")));
  EXPECT_THAT(refusal({.strategy = Strategy::hybrid_shard, .advanced = {.hybrid_group_size = -2}}),
              HasSubstr("hybrid_group_size -2"));
  EXPECT_THAT(refusal({.advanced = {.hybrid_group_size = 2}}),
              AllOf(HasSubstr("hybrid_group_size is 2"), says("strategy is full")));
}

TEST(Sharding, NamesOfOptions) {
  EXPECT_EQ(parallel::parse_dtype("bf16"), at::kBFloat16);
  EXPECT_EQ(parallel::parse_dtype("bfloat16"), at::kBFloat16);
  EXPECT_EQ(parallel::parse_dtype("fp16"), at::kHalf);
  EXPECT_EQ(parallel::parse_dtype("float64"), at::kDouble);
  EXPECT_THAT(error_of([] { parallel::parse_dtype("int8"); }),
              AllOf(HasSubstr("'int8'"), HasSubstr("float32")));
}

}  // namespace
}  // namespace lockstep::test
