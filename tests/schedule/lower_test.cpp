// SPDX-License-Identifier: Apache-2.0
#include "lockstep/schedule/lower.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <iterator>
#include <limits>
#include <map>
#include <set>

#include "lockstep/core/error.h"
#include "lockstep/schedule/render/render.h"
#include "tests/support/says.h"

namespace lockstep::schedule {
namespace {

using ::testing::ThrowsMessage;

using Actions = std::vector<Action>;
using test::says;

Actions computations(const Actions& actions) {
  Actions kept;
  std::copy_if(actions.begin(), actions.end(), std::back_inserter(kept),
               [](const Action& action) { return is_computation(action.op); });
  return kept;
}

// Calls `visit` for one schedule of every kind on a grid.
void for_each_schedule(const std::function<void(const Schedule&)>& visit) {
  for (int kind = 0; kind < static_cast<int>(Kind::file); ++kind) {
    for (const int p : {1, 2, 3, 4, 7}) {
      for (const int m : {1, 2, 3, 4, 7, 8, 14, 21}) {
        for (int v = 1; v <= 4; ++v) {
          Schedule schedule;
          try {
            schedule = generate({static_cast<Kind>(kind), p, m, v});
          } catch (const ConfigError&) {
            continue;  // which are refused is the business of generate_test
          }
          SCOPED_TRACE(std::string(layout::name_of(schedule.kind)) + " p " + std::to_string(p) +
                       " m " + std::to_string(m) + " v " + std::to_string(v));
          visit(schedule);
        }
      }
    }
  }
}

TEST(Lower, OneFOneBOfTwoRanks) {
  const Program program = lower(generate({Kind::one_f_one_b, 2, 2}), {.reduce = true});
  EXPECT_EQ(ops(program.actions[0], 1), "F0 SA0 RG0 F1 SA1 RG1 B0 B1 reduce");
  EXPECT_EQ(ops(program.actions[1], 1), "RA0 F0 RA1 B0 SG0 F1 B1 SG1 reduce");
}

TEST(Lower, TheTurnOfAVStaysOnItsRank) {
  const Program program = lower(generate({Kind::zb_v, 2, 3, 2}));
  for (const Action& action : program.actions[1]) {
    const bool from_self =
        (action.op == Op::send_activation || action.op == Op::recv_gradient)
            ? action.chunk == 0
            : (action.op == Op::recv_activation || action.op == Op::send_gradient) &&
                  action.chunk == 1;
    EXPECT_FALSE(from_self) << name_of(action, 2);
  }
  EXPECT_EQ(ops(lower(generate({Kind::interleaved, 1, 2, 2})).actions[0], 2),
            ops(generate({Kind::interleaved, 1, 2, 2}).actions[0], 2));
}

// A value on its way: what makes it and what uses it, as the two ranks number their computations.
struct Sent {
  bool gradient;
  int stage, microbatch;  // of the maker

  auto operator<=>(const Sent&) const = default;
};

struct Posted {
  Sent value;
  int computation;  // computations of the rank before the action
};

using Channels = std::map<std::pair<int, int>, std::vector<Posted>>;  // by sender and receiver

void collect(const Program& program, Channels& sends, Channels& receives) {
  for (int rank = 0; rank < program.ranks; ++rank) {
    int done = 0;
    for (const Action& action : program.actions[rank]) {
      const int stage = program.stage(rank, action.chunk);
      const bool gradient = action.op == Op::send_gradient || action.op == Op::recv_gradient;
      if (is_computation(action.op)) {
        ++done;
      } else if (action.op == Op::send_activation || action.op == Op::send_gradient) {
        sends[{rank, program.peer(rank, action)}].push_back(
            {{gradient, stage, action.microbatch}, done});
      } else if (action.op == Op::recv_activation || action.op == Op::recv_gradient) {
        receives[{program.peer(rank, action), rank}].push_back(
            {{gradient, stage + (gradient ? 1 : -1), action.microbatch}, done});
      }
    }
  }
}

// The place of a computation among those of its rank.
int index_of(const Schedule& schedule, int stage, int microbatch, bool gradient) {
  const Place place = schedule.place(stage);
  const auto& actions = schedule.actions[place.rank];
  const auto found = std::find_if(actions.begin(), actions.end(), [&](const Action& action) {
    return action.chunk == place.chunk && action.microbatch == microbatch &&
           action.op != Op::backward_weight && (action.op != Op::forward) == gradient;
  });
  return static_cast<int>(found - actions.begin());
}

TEST(Lower, SendsAndReceivesMeet) {
  for_each_schedule([](const Schedule& schedule) {
    const Program program = lower(schedule);
    ASSERT_NO_THROW(check_deadlock(program));
    Channels sends, receives;
    collect(program, sends, receives);
    std::set<Sent> all;
    for (const auto& [ends, channel] : sends) {
      EXPECT_NE(ends.first, ends.second);
      const auto& asked = receives[ends];
      ASSERT_EQ(channel.size(), asked.size());
      int latest = std::numeric_limits<int>::max();
      for (size_t k = channel.size(); k-- > 0;) {
        const Sent& value = channel[k].value;
        all.insert(value);
        EXPECT_EQ(value, asked[k].value);
        const int made = index_of(schedule, value.stage, value.microbatch, value.gradient);
        EXPECT_EQ(channel[k].computation, made + 1) << "not right behind";
        const int user = value.stage + (value.gradient ? -1 : 1);
        const int used = index_of(schedule, user, value.microbatch, value.gradient);
        latest = std::min(latest, std::max(0, used - 1));
        EXPECT_EQ(asked[k].computation, latest) << "not as late as may be, one ahead";
      }
    }
    // Every value that crosses ranks, once.
    size_t crossings = 0;
    for (int stage = 0; stage + 1 < schedule.stages(); ++stage) {
      crossings += schedule.place(stage).rank != schedule.place(stage + 1).rank ? 2 : 0;
    }
    EXPECT_EQ(all.size(), crossings * schedule.microbatches);
    size_t count = 0;
    for (const auto& [ends, channel] : sends) count += channel.size();
    EXPECT_EQ(count, all.size());
    for (int rank = 0; rank < schedule.ranks; ++rank) {
      EXPECT_EQ(computations(program.actions[rank]), schedule.actions[rank]);
    }
  });
}

TEST(Lower, ChunksAreGatheredAroundTheirUse) {
  for (const int most : {1, 2, 3}) {
    for_each_schedule([&](const Schedule& schedule) {
      const Program program =
          lower(schedule, {.unshard = true, .max_unsharded = most, .reduce = true});
      ASSERT_NO_THROW(check_deadlock(program));
      for (int rank = 0; rank < schedule.ranks; ++rank) {
        const auto& actions = program.actions[rank];
        EXPECT_EQ(computations(actions), schedule.actions[rank]);
        std::set<int> open;
        int unshards = 0;
        size_t done = 0;
        for (const Action& action : actions) {
          if (action.op == Op::unshard) {
            ++unshards;
            EXPECT_EQ(action.microbatch, -1);
            EXPECT_TRUE(open.insert(action.chunk).second);
            // Ahead by one computation, unless it is the first or there is room for one chunk.
            const size_t ahead = done == 0 || most == 1 ? 0 : 1;
            EXPECT_TRUE(schedule.actions[rank][done + ahead].chunk == action.chunk ||
                        (done == 0 && schedule.actions[rank][1].chunk == action.chunk));
          } else if (action.op == Op::reshard) {
            EXPECT_EQ(open.erase(action.chunk), 1u);
          } else if (is_computation(action.op)) {
            EXPECT_TRUE(open.contains(action.chunk));
            ++done;
          }
          EXPECT_LE(open.size(), static_cast<size_t>(most));
        }
        EXPECT_TRUE(open.empty());
        if (most >= schedule.chunks) {
          EXPECT_EQ(unshards, schedule.chunks);
        }
      }
    });
  }
}

TEST(Lower, TheChunkNeededLastMakesRoom) {
  const Schedule schedule = generate({Kind::looped_bfs, 1, 1, 4});
  EXPECT_EQ(ops(lower(schedule, {.unshard = true, .max_unsharded = 3}).actions[0], 4),
            "unshard.0 unshard.1 F0.0 unshard.2 F0.1 reshard.0 unshard.3 F0.2 F0.3 B0.3 reshard.3 "
            "B0.2 reshard.2 unshard.0 B0.1 reshard.1 B0.0 reshard.0");
  EXPECT_EQ(ops(lower(schedule, {.unshard = true, .max_unsharded = 1}).actions[0], 4),
            "unshard.0 F0.0 reshard.0 unshard.1 F0.1 reshard.1 unshard.2 F0.2 reshard.2 unshard.3 "
            "F0.3 B0.3 reshard.3 unshard.2 B0.2 reshard.2 unshard.1 B0.1 reshard.1 unshard.0 B0.0 "
            "reshard.0");
  EXPECT_THAT([&] { lower(schedule, {.unshard = true, .max_unsharded = 0}); },
              ThrowsMessage<ConfigError>(says("[schedule] ... max_unsharded is 0 ... at least 1")));
}

TEST(Lower, GradientsAreReducedBehindTheLastOfThem) {
  for_each_schedule([](const Schedule& schedule) {
    const Program program = lower(schedule, {.unshard = true, .reduce = true});
    for (int rank = 0; rank < schedule.ranks; ++rank) {
      std::vector<int> left(schedule.chunks, schedule.microbatches);
      int reduces = 0;
      for (size_t i = 0; i < program.actions[rank].size(); ++i) {
        const Action& action = program.actions[rank][i];
        if (action.op == Op::backward || action.op == Op::backward_weight) --left[action.chunk];
        if (action.op != Op::reduce) continue;
        ++reduces;
        EXPECT_EQ(left[action.chunk], 0);
        // Only what the last gradient sends stands between.
        size_t before = i - 1;
        while (program.actions[rank][before].op == Op::send_gradient) --before;
        EXPECT_TRUE(is_computation(program.actions[rank][before].op));
        EXPECT_EQ(program.actions[rank][before].chunk, action.chunk);
      }
      EXPECT_EQ(reduces, schedule.chunks);
    }
  });
}

}  // namespace
}  // namespace lockstep::schedule
