// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lockstep/core/error.h"
#include "lockstep/layout/offload.h"
#include "lockstep/layout/placement.h"

namespace lockstep::layout {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::EndsWith;
using testing::HasSubstr;
using testing::StartsWith;

template <class Matcher>
auto refusal(const Matcher& matcher) {
  return testing::ThrowsMessage<ConfigError>(matcher);
}

ModelParameters three() {
  ModelParameters parameters;
  parameters.add("embed.weight", {10, 8}, 4).add("up.weight", {32, 8}, 2).add("scale", {}, 8);
  return parameters;
}

TEST(ModelParameters, AreFoundByName) {
  const ModelParameters parameters = three();
  EXPECT_EQ(parameters.size(), 3u);
  EXPECT_TRUE(parameters.has("up.weight"));
  EXPECT_FALSE(parameters.has("up"));
  EXPECT_THAT(parameters.shape("embed.weight"), ElementsAre(10, 8));
  EXPECT_EQ(parameters.elements("up.weight"), 256);
  EXPECT_EQ(parameters.bytes("up.weight"), 512);
  EXPECT_EQ(parameters.elements("scale"), 1);
  EXPECT_EQ(parameters.index("scale"), 2u);
  // In the order in which they were added.
  EXPECT_EQ(parameters.all()[0].name, "embed.weight");
  EXPECT_EQ(parameters, three());
  EXPECT_THAT([&] { parameters.shape("down"); },
              refusal(AllOf(HasSubstr("'down'"), HasSubstr("3"))));
}

TEST(ModelParameters, RefuseWhatCannotBe) {
  ModelParameters parameters = three();
  EXPECT_THAT([&] { parameters.add("scale", {4}, 4); },
              refusal(AllOf(HasSubstr("'scale'"), HasSubstr("(4)"), HasSubstr("()"))));
  EXPECT_THAT([&] { parameters.add("", {4}, 4); }, refusal(HasSubstr("no name")));
  EXPECT_THAT([&] { parameters.add("a", {4, -1}, 4); }, refusal(HasSubstr("(4, -1)")));
  EXPECT_THAT([&] { parameters.add("a", {4}, 0); }, refusal(HasSubstr("0 bytes")));
  EXPECT_EQ(parameters, three());
}

TEST(ModelParameters, AreCounted) {
  EXPECT_EQ(ModelParameters().statistics(), ParameterStatistics{});
  const auto of = [](const std::vector<int64_t>& sizes, int64_t element_bytes) {
    ModelParameters parameters;
    for (const int64_t size : sizes)
      parameters.add(std::to_string(parameters.size()), {size}, element_bytes);
    return parameters.statistics();
  };
  EXPECT_EQ(
      of({7}, 2),
      (ParameterStatistics{
          .count = 1, .elements = 7, .mean = 7, .median = 7, .min = 7, .max = 7, .bytes = 14}));
  EXPECT_EQ(
      of({9, 1, 2}, 4),
      (ParameterStatistics{
          .count = 3, .elements = 12, .mean = 4, .median = 2, .min = 1, .max = 9, .bytes = 48}));
  EXPECT_EQ(of({9, 1, 3, 2}, 4).median, 2.5);
  EXPECT_EQ(three().statistics().bytes, 80 * 4 + 256 * 2 + 8);
  EXPECT_EQ(three().describe(),
            "3 tensors, 337 elements (mean 112.3, median 80, min 1, max 256), 840 B");
}

TEST(OffloadOptions, AreDescribedInOneLine) {
  const OffloadOptions options{.grads = false,
                               .param_budget = int64_t{1} << 30,
                               .device_limit = int64_t{4} << 30,
                               .codec = {.params = codec::Codec::int8},
                               .disk = "/scratch",
                               .advanced = {.pin = false, .update_site = UpdateSite::cpu}};
  EXPECT_THAT(
      options.describe(),
      AllOf(StartsWith("offload parameters, optimizer state, aggressive; device parameters "
                       "1 GB of limit 4 GB, host auto "),
            EndsWith(" limit auto, disk /scratch; codec params=int8; prefetch 16 "
                     "parameters asynchronously, overlap on, pin off; update site cpu, clip "
                     "mode exact")));
  EXPECT_THAT(OffloadOptions{}.describe(),
              AllOf(HasSubstr("parameters, gradients, optimizer state"), HasSubstr("no disk"),
                    HasSubstr("pin auto"), testing::Not(HasSubstr("\n"))));
  EXPECT_EQ((OffloadOptions{.params = false, .grads = false, .optimizer = false}.describe()),
            "offload nothing");
}

}  // namespace
}  // namespace lockstep::layout
