// SPDX-License-Identifier: Apache-2.0
#include "lockstep/schedule/action.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lockstep/core/error.h"
#include "tests/support/says.h"

namespace lockstep::schedule {
namespace {

using test::says;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

TEST(Action, Names) {
  EXPECT_EQ(name_of({Op::forward, 3, 0}, 1), "F3");
  EXPECT_EQ(name_of({Op::forward, 3, 0}, 2), "F3.0");
  EXPECT_EQ(name_of({Op::backward, 12, 1}, 2), "B12.1");
  EXPECT_EQ(name_of({Op::backward_input, 0, 2}, 3), "I0.2");
  EXPECT_EQ(name_of({Op::backward_weight, 0, 0}, 1), "W0");
  EXPECT_EQ(name_of({Op::send_activation, 1, 1}, 2), "SA1.1");
  EXPECT_EQ(name_of({Op::recv_activation, 1, 0}, 1), "RA1");
  EXPECT_EQ(name_of({Op::send_gradient, 1, 0}, 1), "SG1");
  EXPECT_EQ(name_of({Op::recv_gradient, 1, 0}, 1), "RG1");
  EXPECT_EQ(name_of({Op::unshard, -1, 1}, 2), "unshard.1");
  EXPECT_EQ(name_of({Op::reshard, -1, 0}, 1), "reshard");
  EXPECT_EQ(name_of({Op::reduce, -1, 0}, 2), "reduce.0");
}

TEST(Action, ComputationsAreReadAsTheyAreWritten) {
  for (const Op op : {Op::forward, Op::backward, Op::backward_input, Op::backward_weight}) {
    EXPECT_TRUE(is_computation(op));
    for (const int chunks : {1, 3}) {
      const Action action{op, 17, chunks - 1};
      EXPECT_EQ(parse_action(name_of(action, chunks), chunks), action);
    }
  }
  EXPECT_EQ(parse_action("B2.0", 1), (Action{Op::backward, 2, 0}));
  EXPECT_FALSE(is_computation(Op::send_activation));
  EXPECT_FALSE(is_computation(Op::reduce));
}

TEST(Action, WhatIsNoComputationIsRefused) {
  const auto refused = [](const char* name, int chunks, const char* rule) {
    EXPECT_THAT(
        [&] { parse_action(name, chunks); },
        ThrowsMessage<ConfigError>(AllOf(HasSubstr(std::string("'") + name + "'"), says(rule))));
  };
  for (const char* name : {"", "X1", "f1", "SA1", "3", "unshard"}) {
    refused(name, 1, "must begin with F, B, I or W");
  }
  for (const char* name : {"F", "F-1", "F.1", "Fx", "F1000000", "F99999999999"}) {
    refused(name, 2, "micro-batch");
  }
  for (const char* name : {"F1x", "F1.", "F1.x", "F1.-1", "F1.1.1", "F1 "}) {
    refused(name, 1, "chunk ... F3.1");
  }
  refused("F1", 2, "chunk ... F3.1");
  refused("F1.2", 2, "below 2");
  refused("F1.1", 1, "below 1");
}

}  // namespace
}  // namespace lockstep::schedule
