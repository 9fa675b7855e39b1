// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "lockstep/core/error.h"
#include "lockstep/schedule/lower.h"
#include "tests/support/says.h"

namespace lockstep::schedule {
namespace {

using test::says;
using ::testing::ThrowsMessage;

class Deadlock : public ::testing::Test {
 protected:
  // Rank 0: F0 SA0 RG0 F1 SA1 RG1 B0 B1. Rank 1: RA0 F0 RA1 B0 SG0 F1 B1 SG1.
  Program program_ = lower(generate({Kind::one_f_one_b, 2, 2}));

  size_t find(int rank, const Action& action) const {
    const auto& actions = program_.actions[rank];
    return static_cast<size_t>(std::find(actions.begin(), actions.end(), action) - actions.begin());
  }
  void remove(int rank, const Action& action) {
    program_.actions[rank].erase(program_.actions[rank].begin() +
                                 static_cast<ptrdiff_t>(find(rank, action)));
  }
  void swap(int rank, const Action& a, const Action& b) {
    std::swap(program_.actions[rank][find(rank, a)], program_.actions[rank][find(rank, b)]);
  }
  void refused(const std::string& message) const {
    EXPECT_THAT([&] { check_deadlock(program_); },
                ThrowsMessage<ConfigError>(says("[schedule] ... " + message)));
  }
};

TEST_F(Deadlock, ASoundProgramPasses) { EXPECT_NO_THROW(check_deadlock(program_)); }

TEST_F(Deadlock, RefusesValuesThatWereNeverSent) {
  remove(1, {Op::send_gradient, 1, 0});
  refused("rank 0 at B1 for rank 1");
  remove(0, {Op::send_activation, 1, 0});
  refused("rank 0 at B1 for rank 1 ... rank 1 at F1 for rank 0");
}

TEST_F(Deadlock, RefusesReceivesInAnotherOrderThanSends) {
  swap(0, {Op::recv_gradient, 0, 0}, {Op::recv_gradient, 1, 0});
  refused("rank 0: RG1 is paired with SG0 of rank 1");
  program_ = lower(generate({Kind::gpipe, 2, 2}));
  swap(0, {Op::send_activation, 0, 0}, {Op::send_activation, 1, 0});
  refused("rank 0: SA1 ... not computed");
  program_ = lower(generate({Kind::gpipe, 2, 2}));  // rank 1: RA0 RA1 F0 F1 ...
  swap(1, {Op::recv_activation, 0, 0}, {Op::recv_activation, 1, 0});
  refused("rank 1: RA1 is paired with SA0 of rank 0");
}

TEST_F(Deadlock, RefusesAValueWithoutAReceive) {
  remove(1, {Op::recv_activation, 1, 0});
  refused("rank 1: F1 ... receive before");
}

TEST_F(Deadlock, RefusesUnmatchedSendsAndReceives) {
  program_.actions[0].push_back({Op::send_activation, 1, 0});
  refused("rank 0: SA1 ... never received ... rank 1");
  program_.actions[0].pop_back();
  program_.actions[0].push_back({Op::recv_gradient, 1, 0});
  refused("rank 0: RG1 ... never sent ... rank 1");
}

TEST_F(Deadlock, RefusesAnOrderOfComputationsThatDeadlocks) {
  Schedule schedule = generate({Kind::one_f_one_b, 2, 2});
  program_ = lower(schedule);
  // Rank 0 waits for the gradient of micro-batch 0, rank 1 for the activation of micro-batch 1.
  program_.actions[0] = {{Op::forward, 0, 0},       {Op::send_activation, 0, 0},
                         {Op::recv_gradient, 0, 0}, {Op::backward, 0, 0},
                         {Op::forward, 1, 0},       {Op::send_activation, 1, 0},
                         {Op::recv_gradient, 1, 0}, {Op::backward, 1, 0}};
  program_.actions[1] = {{Op::recv_activation, 0, 0}, {Op::recv_activation, 1, 0},
                         {Op::forward, 0, 0},         {Op::forward, 1, 0},
                         {Op::backward, 0, 0},        {Op::send_gradient, 0, 0},
                         {Op::backward, 1, 0},        {Op::send_gradient, 1, 0}};
  refused("rank 0 at B0 for rank 1 ... rank 1 at F1 for rank 0");
}

}  // namespace
}  // namespace lockstep::schedule
