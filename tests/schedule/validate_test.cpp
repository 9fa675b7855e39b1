// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "lockstep/core/error.h"
#include "lockstep/schedule/schedule.h"
#include "tests/support/says.h"

namespace lockstep::schedule {
namespace {

using test::says;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

std::vector<Action> row(const std::vector<std::string>& names, int chunks) {
  std::vector<Action> actions;
  for (const auto& name : names) actions.push_back(parse_action(name, chunks));
  return actions;
}

Schedule two_ranks(const std::vector<std::string>& first, const std::vector<std::string>& second) {
  return {{Kind::file, 2, 2, 1, StageOrder::loop}, {row(first, 1), row(second, 1)}};
}

void refused(const Schedule& schedule, const std::string& message) {
  EXPECT_THAT([&] { validate(schedule); },
              ThrowsMessage<ConfigError>(says("[schedule] ... file: ... " + message)));
}

const std::vector<std::string> kGood = {"F0", "F1", "B0", "B1"};

TEST(Validate, AcceptsAnyOrderThatCanRun) {
  EXPECT_NO_THROW(validate(two_ranks(kGood, kGood)));
  EXPECT_NO_THROW(validate(two_ranks({"F1", "F0", "B0", "B1"}, {"F0", "F1", "B1", "B0"})));
  // One stage splits its backward, the other does not.
  EXPECT_NO_THROW(validate(two_ranks({"F0", "F1", "I0", "B1", "W0"}, kGood)));
}

TEST(Validate, EveryActionOnce) {
  refused(two_ranks({"F0", "F1", "B0"}, kGood), "rank 0: B1 is missing");
  refused(two_ranks(kGood, {"F0", "B0"}), "rank 1: F1 is missing");
  refused(two_ranks({}, kGood), "rank 0: F0 is missing");
  refused(two_ranks(kGood, {"F0", "F1", "B0", "I1"}), "rank 1: W1 is missing");
  refused(two_ranks({"F0", "F1", "F0", "B0", "B1"}, kGood), "rank 0: F0 is there twice");
  refused(two_ranks(kGood, {"F0", "F1", "B0", "B1", "B1"}), "rank 1: B1 is there twice");
  refused(two_ranks({"F0", "F1", "I0", "W0", "W0", "B1"}, kGood), "rank 0: W0 is there twice");
  refused(two_ranks({"F0", "F1", "B0", "I0", "B1"}, kGood), "rank 0: I0 repeats ... B0");
  refused(two_ranks({"F0", "F1", "B0", "W0", "B1"}, kGood), "rank 0: W0 repeats ... B0");
  refused(two_ranks({"F0", "F1", "I0", "W0", "B0", "B1"}, kGood), "rank 0: B0 repeats I0");
}

TEST(Validate, OrderOnARank) {
  refused(two_ranks({"F0", "B1", "F1", "B0"}, kGood), "rank 0: B1 must stand behind F1");
  refused(two_ranks({"I0", "F0", "F1", "W0", "B1"}, kGood), "rank 0: I0 must stand behind F0");
  refused(two_ranks({"F0", "F1", "W0", "I0", "B1"}, kGood), "rank 0: W0 must stand behind I0");
}

TEST(Validate, NumbersInRange) {
  refused(two_ranks({"F0", "F1", "B0", "B1", "F2"}, kGood),
          "rank 0: F2 ... micro-batch ... 0 to 1");
  auto schedule = two_ranks(kGood, kGood);
  schedule.actions[1][0].chunk = 1;
  refused(schedule, "rank 1: F0 ... chunk ... 0 to 0");
  schedule = two_ranks(kGood, kGood);
  schedule.actions[1].push_back({Op::send_gradient, 0, 0});
  refused(schedule, "rank 1: SG0 ... computation");
  schedule = two_ranks(kGood, kGood);
  schedule.actions.pop_back();
  refused(schedule, "actions of 1 ranks ... of 2");
  schedule.ranks = 0;
  refused(schedule, "ranks is 0 ... at least 1");
  schedule = two_ranks(kGood, kGood);
  schedule.order = StageOrder::v;
  refused(schedule, "chunks is 1 ... 2 ... V");
  schedule.microbatches = 2'000'000'000;
  EXPECT_THAT([&] { validate(schedule); },
              ThrowsMessage<ConfigError>(HasSubstr("at most 4194304")));
}

TEST(Validate, RanksThatWaitForEachOther) {
  // Rank 0 wants the gradient of micro-batch 0 before it computes the forward that rank 1 wants.
  refused(two_ranks({"F0", "B0", "F1", "B1"}, kGood),
          "rank 0: B0 waits for B0 of rank 1 ... never runs");
  // Chunk 1 of the only rank comes before what it needs.
  const Schedule own{{Kind::file, 1, 1, 2, StageOrder::loop},
                     {row({"F0.1", "F0.0", "B0.1", "B0.0"}, 2)}};
  refused(own, "rank 0: F0.1 waits for F0.0 of rank 0 ... never runs");
}

// Swapping two neighbours, or leaving one out, must be noticed exactly where a rule is broken; a
// slow statement of the rules decides: repeat until nothing moves.
bool runs(const Schedule& schedule) {
  std::vector<std::vector<Action>> left = schedule.actions, done(schedule.ranks);
  const auto has = [&](int stage, int microbatch, bool forward) {
    const Place place = schedule.place(stage);
    return std::any_of(done[place.rank].begin(), done[place.rank].end(), [&](const Action& action) {
      return action.chunk == place.chunk && action.microbatch == microbatch &&
             (action.op == Op::forward) == forward && action.op != Op::backward_weight;
    });
  };
  for (bool moved = true; moved;) {
    moved = false;
    for (int rank = 0; rank < schedule.ranks; ++rank) {
      if (left[rank].empty()) continue;
      const Action action = left[rank].front();
      const int stage = schedule.stage(rank, action.chunk);
      bool ready = true;
      if (action.op == Op::forward) {
        ready = stage == 0 || has(stage - 1, action.microbatch, true);
      } else if (action.op == Op::backward_weight) {
        ready = has(stage, action.microbatch, false);
      } else {
        ready = has(stage, action.microbatch, true) &&
                (stage + 1 == schedule.stages() || has(stage + 1, action.microbatch, false));
      }
      if (!ready) continue;
      done[rank].push_back(action);
      left[rank].erase(left[rank].begin());
      moved = true;
    }
  }
  return std::all_of(left.begin(), left.end(), [](const auto& rest) { return rest.empty(); });
}

TEST(Validate, NeighboursSwapped) {
  int sound = 0, broken = 0;
  for (const auto& options :
       {ScheduleOptions{.kind = Kind::one_f_one_b, .ranks = 3, .microbatches = 5},
        ScheduleOptions{.kind = Kind::interleaved, .ranks = 2, .microbatches = 4, .chunks = 2},
        ScheduleOptions{.kind = Kind::zb_v, .ranks = 3, .microbatches = 5, .chunks = 2},
        ScheduleOptions{.kind = Kind::dualpipe_v, .ranks = 2, .microbatches = 5, .chunks = 2}}) {
    const Schedule original = generate(options);
    for (int rank = 0; rank < original.ranks; ++rank) {
      for (size_t i = 0; i + 1 < original.actions[rank].size(); ++i) {
        Schedule schedule = original;
        std::swap(schedule.actions[rank][i], schedule.actions[rank][i + 1]);
        if (runs(schedule)) {
          ++sound;
          EXPECT_NO_THROW(validate(schedule));
        } else {
          ++broken;
          EXPECT_THROW(validate(schedule), ConfigError);
        }
        schedule.actions[rank].erase(schedule.actions[rank].begin() + static_cast<ptrdiff_t>(i));
        EXPECT_THROW(validate(schedule), ConfigError);
      }
    }
  }
  EXPECT_GT(sound, 20);
  EXPECT_GT(broken, 20);
}

}  // namespace
}  // namespace lockstep::schedule
