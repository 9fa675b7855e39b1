// SPDX-License-Identifier: Apache-2.0
#include "tests/support/says.h"

#include <gtest/gtest.h>

#include <stdexcept>

namespace lockstep::test {
namespace {

using testing::Not;
using testing::ThrowsMessage;

TEST(Says, AllFactsInAnyOrder) {
  const std::string text = "step 7: tensor 'a.b' has 13 rows on rank 0 and -4 on rank 1";
  EXPECT_THAT(text, says("a.b ... 13 rows ... rank 1"));
  EXPECT_THAT(text, says("rank 1 ... -4 ... a.b"));
  EXPECT_THAT(text, says(text));
  EXPECT_THAT(text, Not(says("a.b ... 12 rows")));
  EXPECT_THAT(text, Not(says("14 rows ... a.b")));
  EXPECT_THAT(text.c_str(), says("tensor"));
  EXPECT_THAT([&] { throw std::runtime_error(text); },
              ThrowsMessage<std::runtime_error>(says("7")));
}

TEST(Says, NumbersAndWordsAreWhole) {
  for (const char* text : {"13", "31", "-3", "3.5", "0.3", "w3", "3x", "3_000"})
    EXPECT_THAT(text, Not(says("3"))) << text;
  for (const char* text : {"3", "3.", "3,4", "(3)", "is 3: x", "a-3", "'3'", "x=3", "13 and 3"})
    EXPECT_THAT(text, says("3")) << text;
  EXPECT_THAT("step 10", Not(says("step 1")));
  EXPECT_THAT("--train.steps", Not(says("--train.step")));
  EXPECT_THAT("blocks.1.weight", says("weight"));
  EXPECT_THAT("at least -2", Not(says("at least 2")));
  EXPECT_THAT("heads = 4 is no multiple", says("heads is 4 ... heads = 4"));
  EXPECT_THAT("heads is 14", Not(says("heads is 4")));
}

TEST(Says, NamesTheFactThatIsMissing) {
  EXPECT_EQ(missing_fact("heads is 4", "heads ... tp 3 ... 5"), "tp 3");
  EXPECT_EQ(missing_fact("heads is 4", "heads ... 4"), "");
}

}  // namespace
}  // namespace lockstep::test
