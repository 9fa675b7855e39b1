// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lockstep/core/error.h"
#include "lockstep/schedule/render/render.h"
#include "tests/schedule/tables.h"
#include "tests/support/says.h"
#include "tests/support/subprocess.h"

namespace lockstep::schedule {
namespace {

using test::says;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

TEST(Csv, GoesBothWays) {
  for (const auto& [options, rows] : tables()) {
    Schedule schedule = generate(options);
    const Schedule read = from_csv(to_csv(schedule), "x.csv");
    EXPECT_EQ(read.kind, Kind::file);
    schedule.kind = Kind::file;
    EXPECT_EQ(read, schedule);
  }
  EXPECT_EQ(to_csv(generate({Kind::one_f_one_b, 2, 2})),
            "placement,loop\nF0,F1,B0,B1\nF0,B0,F1,B1\n");
  EXPECT_EQ(to_csv(generate({Kind::zb_v, 1, 1, 2})),
            "placement,v\nF0.0,F0.1,I0.1,W0.1,I0.0,W0.0\n");
}

TEST(Csv, SpacesAndLineEndsOfOthers) {
  const Schedule schedule = from_csv("placement , loop\r\n F0.0, B0.0 \r\n\r\n", "x.csv");
  EXPECT_EQ(schedule.ranks, 1);
  EXPECT_EQ(schedule.chunks, 1);
  EXPECT_EQ(schedule.actions[0], (std::vector<Action>{{Op::forward, 0, 0}, {Op::backward, 0, 0}}));
}

TEST(Csv, WhatIsWrongHasALineAndAnAction) {
  const auto refused = [](const char* text, const char* message) {
    EXPECT_THAT([&] { from_csv(text, "x.csv"); }, ThrowsMessage<ConfigError>(says(message)));
  };
  refused("", "x.csv: is empty");
  refused("\n\n", "x.csv: is empty");
  refused("F0,B0\n", "x.csv:1: is 'F0,B0', must be placement,loop or placement,v");
  refused("placement,ring\n",
          "x.csv:1: is 'placement,ring', must be placement,loop or placement,v");
  refused("placement,v,v\nF0,B0\n",
          "x.csv:1: is 'placement,v,v', must be placement,loop or placement,v");
  refused("placement,loop\n", "x.csv:1: no rank follows");
  refused("placement,loop\nF0,B0\nF0,SG0\n", "x.csv:3: rank 1: 'SG0' ... F, B, I or W");
  refused("placement,loop\nF0,B0\n\nF0,B0\n", "x.csv:3: rank 1: '' ... F, B, I or W");
  refused("placement,loop\nF0,,B0\n", "x.csv:2: rank 0: '' ... F, B, I or W");
  refused("placement,loop\nF0.0,F0.1,B0.1,B0\n",
          "x.csv:2: rank 0: 'B0' ... point ... chunk ... F3.1");
  refused("placement,v\nF0,B0\n", "x.csv:1: chunks is 1 ... 2 ... V");
  refused("placement,loop\nF0,F1,B0,B1\nF0,F1,B0\n", "x.csv:3: rank 1: B1 is missing");
  refused("placement,loop\nF0,B0\nF0,B0,B0\n", "x.csv:3: rank 1: B0 is there twice");
  refused("placement,loop\nB0,F0\n", "x.csv:2: rank 0: B0 must stand behind F0");
  refused("placement,loop\nF0,I0\n", "x.csv:2: rank 0: W0 is missing");
  refused("placement,loop\nF0,B0,F1,B1\nF0,F1,B0,B1\n",
          "x.csv:2: rank 0: B0 waits for B0 of rank 1 ... never runs");
  refused("placement,loop\nF999999.999999,B0.0\n",
          "x.csv:1: 1 ranks x 1000000 micro-batches x 1000000 chunks ... at most 4194304");
}

TEST(Csv, AFileMustHaveTheNumbersThatAreGiven) {
  const test::TempDir dir;
  const std::string path = dir.path() + "/x.csv";
  test::write_file(path, to_csv(generate({Kind::interleaved, 2, 4, 3})));
  const auto options = [&](int ranks, int microbatches, int chunks) {
    return ScheduleOptions{Kind::file, ranks, microbatches, chunks, 0, path};
  };
  const Schedule schedule = generate(options(0, 0, 0));
  EXPECT_EQ(schedule, generate(options(2, 4, 3)));
  EXPECT_EQ(schedule.ranks, 2);
  EXPECT_EQ(schedule.microbatches, 4);
  EXPECT_EQ(schedule.chunks, 3);
  const auto refused = [](const ScheduleOptions& wrong, const std::string& message) {
    EXPECT_THAT([&] { generate(wrong); }, ThrowsMessage<ConfigError>(says(message)));
  };
  refused(options(4, 4, 3), path + ": ranks is 2 in the file, but must be 4");
  refused(options(2, 8, 3), path + ": microbatches is 4 in the file, but must be 8");
  refused(options(2, 4, 1), path + ": chunks is 3 in the file, but must be 1");
  auto grouped = options(2, 4, 3);
  grouped.group = 2;
  refused(grouped, "[schedule] file ... group is 2 ... only interleaved and zb-1p have groups");
  auto missing = options(2, 4, 3);
  missing.file = dir.path() + "/none";
  EXPECT_THAT([&] { generate(missing); },
              ThrowsMessage<ConfigError>(HasSubstr("none: No such file")));
  test::write_file(path, "");
  refused(options(0, 0, 0), path + ": is empty");
}

}  // namespace
}  // namespace lockstep::schedule
