// SPDX-License-Identifier: Apache-2.0
// Who left the common order, from what the flight recorders of the ranks say; and dumps of them.
#include "lockstep/flight/flight.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <unistd.h>

#include <csignal>
#include <cstring>
#include <memory>

#include "lockstep/core/error.h"
#include "lockstep/flight/culprit.h"
#include "lockstep/flight/dump.h"
#include "lockstep/flight/operation_totals.h"
#include "lockstep/flight/recorder.h"
#include "lockstep/flight/sign_fault.h"
#include "lockstep/flight/slow_ranks.h"
#include "tests/support/subprocess.h"

namespace lockstep::flight {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

constexpr int64_t kSecond = 1'000'000'000;
constexpr int64_t kNow = 1000 * kSecond;

// A rank in one group of all, which has called so many all-reduces and finished all but the last.
Flight flight(int rank, uint32_t calls, bool waits, const std::string& last = "all_reduce") {
  Flight flight{.rank = rank, .world = 3, .pid = 100 + rank, .taken_at = kNow, .step = 7};
  flight.groups.push_back({"world", 3, calls});
  for (uint32_t number = 1; number <= calls; ++number) {
    const int64_t began = kNow - 10 * kSecond + number * kSecond / 1000;
    Operation operation{.group = "world",
                        .name = number == calls ? last : "all_reduce",
                        .dtype = "float32",
                        .tag = "bucket",
                        .ticket = number,
                        .number = number,
                        .count = 8,
                        .began = began,
                        .waited = 0,
                        .ended = began + 1000,
                        .patience_ms = 2000};
    if (number == calls && waits) {
      operation.waited = began;
      operation.ended = 0;
    }
    flight.operations.push_back(operation);
  }
  return flight;
}

Operation message(const std::string& name, uint32_t number, int peer, bool waits) {
  return {.group = "pp",
          .name = name,
          .dtype = "float32",
          .tag = "",
          .ticket = 1000 + number,
          .number = number,
          .peer = peer,
          .message = true,
          .count = 4,
          .began = kNow - 5 * kSecond,
          .waited = waits ? kNow - 5 * kSecond : 0,
          .ended = waits ? 0 : kNow - 4 * kSecond,
          .patience_ms = 2000};
}

TEST(Culprit, IsTheRankThatHasNotCome) {
  const auto culprit = find_culprit({flight(0, 5, true), flight(1, 4, false), flight(2, 5, true)});
  ASSERT_TRUE(culprit);
  EXPECT_EQ(culprit->kind, Culprit::Kind::missing);
  EXPECT_EQ(culprit->rank, 1);
  EXPECT_THAT(culprit->waiting, ElementsAre(0, 2));
  EXPECT_EQ(culprit->operation.number, 5u);
}

TEST(Culprit, IsTheRankThatCalledSomethingElse) {
  const auto culprit = find_culprit(
      {flight(0, 5, true), flight(1, 5, true), flight(2, 5, true, "all_gather")}, true);
  ASSERT_TRUE(culprit);
  EXPECT_EQ(culprit->kind, Culprit::Kind::mismatch);
  EXPECT_EQ(culprit->rank, 2);
  EXPECT_THAT(culprit->waiting, ElementsAre(0, 1));
}

// 0 waits for 1 in the world, 1 waits for a message of 2, which does something else.
TEST(Culprit, IsFoundBehindRanksThatWaitThemselves) {
  auto one = flight(1, 4, false), two = flight(2, 4, false);
  one.operations.push_back(message("recv", 3, 2, true));
  two.operations.push_back(message("send", 2, 1, false));
  const auto culprit = find_culprit({flight(0, 5, true), one, two});
  ASSERT_TRUE(culprit);
  EXPECT_EQ(culprit->rank, 2);
  EXPECT_THAT(culprit->waiting, testing::Contains(1));
}

// On a device several operations wait at a time; all ranks have come to the first of them.
TEST(Culprit, IsFoundBehindOperationsThatAllHaveCalled) {
  auto zero = flight(0, 5, true);
  for (Operation& operation : zero.operations) {
    operation.waited = operation.began;
    operation.ended = 0;
  }
  const auto culprit = find_culprit({zero, flight(1, 4, false)}, true);
  ASSERT_TRUE(culprit);
  EXPECT_EQ(culprit->rank, 1);
  EXPECT_EQ(culprit->operation.number, 5u);
}

TEST(Culprit, RanksThatWaitForEachOtherAreADeadlock) {
  auto one = flight(1, 4, false);
  one.operations.push_back(message("recv", 1, 0, true));
  auto zero = flight(0, 5, true);
  zero.world = one.world = 2;
  const auto culprit = find_culprit({zero, one});
  ASSERT_TRUE(culprit);
  EXPECT_EQ(culprit->kind, Culprit::Kind::deadlock);
}

TEST(Culprit, NobodyWhereAllHaveCome) {
  EXPECT_FALSE(find_culprit({flight(0, 5, true), flight(1, 5, true), flight(2, 5, false)}));
  EXPECT_FALSE(find_culprit({}));
}

TEST(Culprit, PatienceIsThatOfTheOperationAndTenTimesWhatItTakes) {
  auto zero = flight(0, 5, true);
  const auto one = flight(1, 4, false);
  EXPECT_TRUE(find_culprit({zero, one}, true));
  zero.operations.back().patience_ms = 20'000;
  EXPECT_FALSE(find_culprit({zero, one}, true));
  zero.operations.back().patience_ms = 2000;
  for (Operation& operation : zero.operations) {
    if (!operation.running()) operation.ended = operation.began + 2 * kSecond;
  }
  EXPECT_FALSE(find_culprit({zero, one}, true)) << "it takes 2 s each time";
}

TEST(Culprit, VerdictNamesARankThatWasKilledBeforeThoseThatMissIt) {
  auto two = flight(2, 4, false);
  two.end = "was killed by SIGKILL (signal 9)";
  two.ended_at = kNow - kSecond;
  auto zero = flight(0, 5, true);
  zero.end = "exited with code 1";
  zero.ended_at = kNow;
  EXPECT_THAT(verdict({zero, two}), HasSubstr("rank 2"));
}

TEST(FlightDump, HoldsAllThatAFlightSays) {
  const test::TempDir folder;
  Flight before = flight(0, 3, true);
  before.failure = "a \"failure\" with \\ and\ttab";
  before.stacks = "thread 1:\n  main\n";
  before.step_ns = {1, 2};
  before.blocked_ns = {0, 1};
  before.end = "exited with code 1";
  before.ended_at = kNow;
  write_dump(folder.path() + "/attempt_0", 0, flight(0, 1, false));
  write_dump(folder.path() + "/attempt_1", 0, before);
  const std::vector<Flight> after = read_dumps(folder.path());  // the newest
  ASSERT_EQ(after.size(), 1u);
  EXPECT_EQ(after[0].failure, before.failure);
  EXPECT_EQ(after[0].stacks, before.stacks);
  EXPECT_EQ(after[0].step_ns, before.step_ns);
  EXPECT_EQ(after[0].ended_at, before.ended_at);
  EXPECT_EQ(after[0].calls_of("world"), 3);
  ASSERT_EQ(after[0].operations.size(), 3u);
  EXPECT_EQ(after[0].operations[2].text(), before.operations[2].text());
  EXPECT_EQ(after[0].operations[2].waited, before.operations[2].waited);
}

TEST(FlightDump, OtherFilesAreRefused) {
  const test::TempDir folder;
  EXPECT_THROW(read_dumps(folder.path() + "/none"), ConfigError);
  EXPECT_THROW(read_dumps(folder.path()), ConfigError);
  for (const std::string text :
       {"", "[]", "{}", "{\"format\":\"lockstep flight recorder 1\"}", "no json", "\xff"}) {
    test::write_file(dump_path(folder.path(), 0), text);
    EXPECT_THROW(read_dumps(folder.path()), ConfigError) << text;
  }
}

// The last entries are kept, and one that was overwritten is not ended by its old ticket.
TEST(Recorder, KeepsTheLastOperations) {
  start(3, 4);
  ASSERT_TRUE(started());
  const uint16_t group = add_group("a group", 4), other = add_group("another", 2);
  EXPECT_EQ(add_group("a group", 4), group);
  EXPECT_NE(other, group);
  const auto call = [&](uint16_t to) {
    return begin({.group = to, .operation = "all_reduce", .tag = "t", .count = 5});
  };
  const uint64_t first = call(group);
  for (size_t i = 1; i < kEntries; ++i) end(call(group), Clock::now());
  wait(call(other));  // in the place of the first
  end(first, Clock::now());
  const Flight now = read_page(*page());
  ASSERT_EQ(now.operations.size(), kEntries);
  EXPECT_EQ(now.rank, 3);
  EXPECT_EQ(now.calls_of("a group"), static_cast<int64_t>(kEntries));
  EXPECT_EQ(now.calls_of("another"), 1);
  EXPECT_EQ(now.last()->group, "another");
  EXPECT_TRUE(now.last()->running());
  EXPECT_EQ(now.awaited(), now.last());
}

TEST(Recorder, CountsMessagesOfEachDirectionAndPeer) {
  start(3, 4);
  const uint16_t group = add_group("messages", 4);
  for (const auto& [name, peer] : std::vector<std::pair<std::string, int>>{
           {"send", 1}, {"send", 1}, {"recv", 1}, {"send", 2}, {"send", 1}}) {
    begin(
        {.group = group, .operation = name, .tag = "", .count = 1, .peer = peer, .message = true});
  }
  const Flight now = read_page(*page());
  std::vector<uint32_t> numbers;
  for (const Operation& operation : now.operations) {
    if (operation.group == "messages") numbers.push_back(operation.number);
  }
  EXPECT_THAT(numbers, ElementsAre(1, 2, 1, 1, 3));
}

TEST(SlowRanks, AreNamedAfterSixStepsOrThree) {
  constexpr int64_t kMs = 1'000'000;
  for (const auto& [factor, steps] : {std::pair(2, 6), {4, 3}}) {
    SlowRanks judge;
    for (int step = 1; step <= steps; ++step) {
      const auto slow = judge.judge({100 * kMs, 100 * kMs, factor * 100 * kMs, 90 * kMs});
      ASSERT_EQ(slow.size(), step == steps ? 1u : 0u) << factor << " " << step;
    }
    const auto slow = judge.judge({100 * kMs, 100 * kMs, factor * 100 * kMs, 90 * kMs});
    EXPECT_EQ(slow[0].rank, 2);
    EXPECT_EQ(slow[0].usual_ns, 100 * kMs);
    EXPECT_EQ(slow[0].ratio(), factor);
    EXPECT_TRUE(judge.judge({100 * kMs, 100 * kMs, 100 * kMs, 90 * kMs}).empty());
  }
  SlowRanks few;
  for (int step = 0; step < 9; ++step)
    EXPECT_TRUE(few.judge({2 * kMs, 20 * kMs}).empty());  // 18 ms
  EXPECT_TRUE(few.judge({500 * kMs}).empty());
}

TEST(OperationTotals, CountWhatWasRecordedSinceTheLastReading) {
  const auto page = std::make_unique<Page>();
  const auto record = [&](uint64_t ticket, int64_t began, int64_t waited, int64_t ended) {
    Entry& entry = page->entries[(ticket - 1) % kEntries];
    std::strcpy(entry.operation, "all_reduce");
    entry.dtype = static_cast<uint8_t>(DType::float32);
    entry.count = 10;
    entry.began = began;
    entry.waited = waited;
    entry.ended = ended;
    entry.ticket = ticket;
    page->next = ticket;
  };
  OperationTotals totals;
  record(1, 100, 150, 200);
  record(2, 200, 0, 260);
  record(3, 300, 310, 0);  // in flight
  totals.read(*page);
  const auto first = totals.take();
  ASSERT_EQ(first.size(), 1u);
  const OperationTotal& total = first.at("all_reduce");
  EXPECT_EQ(total.count, 2);
  EXPECT_EQ(total.bytes, 80);
  EXPECT_EQ(total.flight_ns, 160);
  EXPECT_EQ(total.waited_ns, 50);
  totals.read(*page);
  EXPECT_TRUE(totals.take().empty());
}

TEST(FlightPage, OfThisProcessIsReadFromOutside) {
  start(0, 1);
  set_step(41, 1000, 10);
  const auto flight = read_process(getpid());
  ASSERT_TRUE(flight);
  EXPECT_EQ(flight->pid, getpid());
  EXPECT_EQ(flight->step, 41);
  EXPECT_FALSE(read_process(-1));
}

TEST(SignFault, ActsOnceAtItsSign) {
  SignFault fault;
  fault.parse("rank=1,step=2,action=kill;rank=2,step=3,sign=2,action=stop", 1);
  for (int i = 0; i < 10; ++i) fault.count(5);  // another rank's
  fault.parse("rank=1,step=3,sign=2,action=kill", 1);
  EXPECT_EXIT(
      {
        for (int i = 0; i < 10; ++i) fault.count(1);
        fault.count(2);
        fault.count(2);
      },
      testing::KilledBySignal(SIGKILL), "");
  for (int i = 0; i < 10; ++i) fault.count(1);
  fault.count(2);
  for (const char* text : {"rank=1,sign=0,action=kill", "rank=1,sign=2,action=nan",
                           "rank=1,sign=2,action=kill,x=1", "sign=2,action=kill", "rank=1,sign=2"})
    EXPECT_THROW(SignFault().parse(text, 1), ConfigError) << text;
}

}  // namespace
}  // namespace lockstep::flight
