#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/schedule/lower.h"
#include "lockstep/schedule/schedule.h"
#include "tests/schedule/tables.h"

namespace lockstep::schedule {
namespace {

std::string row(const Schedule& schedule, int rank) {
  std::vector<std::string> names;
  for (const Action& action : schedule.actions[rank]) {
    names.push_back(name_of(action, schedule.chunks));
  }
  return join(names, " ");
}

TEST(Generate, TheWorkedTables) {
  for (const auto& [options, rows] : tables()) {
    const Schedule schedule = generate(options);
    for (int rank = 0; rank < 4; ++rank) {
      EXPECT_EQ(row(schedule, rank), rows[rank])
          << layout::name_of(options.kind) << " rank " << rank;
    }
  }
}

TEST(Generate, Grid) {
  int count = 0, refused = 0;
  for (int kind = 0; kind < static_cast<int>(Kind::file); ++kind) {
    for (int p = 1; p <= 8; ++p) {
      for (int m = 1; m <= 24; ++m) {
        for (int v = 1; v <= 4; ++v) {
          Schedule schedule;
          try {
            schedule = generate(
                {.kind = static_cast<Kind>(kind), .ranks = p, .microbatches = m, .chunks = v});
          } catch (const ConfigError& e) {
            if (std::string(e.what()).find("waits") != std::string::npos)
              ADD_FAILURE() << e.what() << p << m << v;
            ++refused;
            continue;
          }
          for (bool unshard : {false, true})
            check_deadlock(lower(
                schedule, {.unshard = unshard, .max_unsharded = 1 + m % 3, .reduce = unshard}));
          ++count;
        }
      }
    }
  }
  std::printf("%d %d\n", count, refused);
}

}  // namespace
}  // namespace lockstep::schedule
