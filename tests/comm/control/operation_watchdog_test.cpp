// SPDX-License-Identifier: Apache-2.0
// A rank that hosts the rendezvous may finish, and end, while others still wait for data that it
// has sent.
#include "lockstep/comm/control/operation_watchdog.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "lockstep/core/error.h"
#include "tests/support/says.h"

namespace lockstep::comm::detail {
namespace {

using lockstep::test::says;

class StoreThatIsGone final : public launch::Store {
 public:
  void set(const std::string&, const std::string&) override {}
  std::string get(const std::string&, const Deadline&) override { throw CommError("closed"); }
  std::optional<std::string> find(const std::string&) override { throw CommError("closed"); }
  int64_t add(const std::string&, int64_t) override { throw CommError("closed"); }
  bool remove(const std::string&) override { return false; }
};

class RendezvousGone : public testing::Test {
 protected:
  RendezvousGone() {
    auto world = std::make_shared<World>();
    world->store = std::make_shared<StoreThatIsGone>();
    world->hosts = {0, 1};
    membership_ = {"world", 1, {0, 1}, world};
    operation_.kind = fabric::OpKind::barrier;
    operation_.timeout = milliseconds{20'000};
  }

  Membership membership_;
  fabric::Operation operation_;
};

TEST_F(RendezvousGone, WaitsForAnOperationThatEndsSoon) {
  OperationWatchdog watchdog(membership_);
  const uint64_t sequence = watchdog.begin(operation_);
  int asked = 0;
  EXPECT_NO_THROW(watchdog.wait(operation_, sequence, Clock::now(), [&](milliseconds) {
    return ++asked == 4;  // at once, all of them
  }));
  EXPECT_EQ(asked, 4);
}

TEST_F(RendezvousGone, GivesUpAnOperationLongBeforeItsDeadline) {
  OperationWatchdog watchdog(membership_);
  const uint64_t sequence = watchdog.begin(operation_);
  const auto start = Clock::now();
  try {
    watchdog.wait(operation_, sequence, start, [](milliseconds time) {
      std::this_thread::sleep_for(time);
      return false;
    });
    ADD_FAILURE() << "no exception";
  } catch (const CommError& error) {
    EXPECT_THAT(error.what(), says("rendezvous ... gone"));
  }
  EXPECT_LT(seconds_since(start), 15);
}

TEST_F(RendezvousGone, AGroupWithoutTheHostingRankKeepsWaiting) {
  membership_.members = {1, 2};
  OperationWatchdog watchdog(membership_);
  const uint64_t sequence = watchdog.begin(operation_);
  const auto start = Clock::now();
  EXPECT_NO_THROW(watchdog.wait(operation_, sequence, start, [&](milliseconds time) {
    std::this_thread::sleep_for(time);
    return seconds_since(start) > 1.5;
  }));
  operation_.timeout = milliseconds{50};
  EXPECT_THROW(
      watchdog.wait(operation_, sequence, Clock::now(), [](milliseconds) { return false; }),
      CommError);
}

}  // namespace
}  // namespace lockstep::comm::detail
