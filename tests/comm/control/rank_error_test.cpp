// SPDX-License-Identifier: Apache-2.0
#include "lockstep/comm/control/rank_error.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <typeinfo>

#include "lockstep/core/error.h"

namespace lockstep::comm::detail {
namespace {

// What another rank throws for it.
template <class Thrown>
void expect_same_class(const Thrown& thrown) {
  const RankError error = RankError::of(std::make_exception_ptr(thrown), 2);
  try {
    RankError::parse(error.to_text()).raise();
  } catch (const std::exception& arrived) {
    EXPECT_EQ(typeid(arrived), typeid(Thrown)) << arrived.what();
    EXPECT_STREQ(arrived.what(), thrown.what());
  }
}

TEST(RankError, KeepsTheClassAndAllLines) {
  expect_same_class(PeerLost(7, "rank 7 is lost"));
  expect_same_class(TimeoutError("late"));
  expect_same_class(MismatchError(""));
  expect_same_class(DamagedData(7, "damaged"));
  expect_same_class(CommError(" broken\nhere\n"));
  expect_same_class(CheckpointError("damaged"));
  expect_same_class(ConfigError("wrong"));
  expect_same_class(Error("12 monkeys"));
  EXPECT_EQ(RankError::of(std::make_exception_ptr(PeerLost(7, "x")), 2).rank, 7);
  EXPECT_EQ(RankError::of(std::make_exception_ptr(DamagedData(7, "x")), 2).rank, 7);
  EXPECT_EQ(RankError::of(std::make_exception_ptr(std::logic_error("x")), 2).to_text(), "- 2 x");
}

TEST(RankError, ContributionHasAValueOrAnError) {
  const Contribution good(1, [] { return std::string("!text"); });
  EXPECT_NO_THROW(good.throw_if_failed());
  EXPECT_FALSE(Contribution::error_in(good.text()));
  EXPECT_EQ(Contribution::value_in(good.text()), "!text");

  const Contribution bad(
      1, []() -> std::string { throw ConfigError("no place"); }, 9);
  EXPECT_THROW(bad.throw_if_failed(), ConfigError);
  EXPECT_EQ(bad.text().size(), 9);
  const auto error = Contribution::error_in(bad.text());
  ASSERT_TRUE(error);
  EXPECT_EQ(error->kind, RankError::Kind::config);
  EXPECT_EQ(error->rank, 1);
  EXPECT_EQ(error->message, "no p");
}

}  // namespace
}  // namespace lockstep::comm::detail
