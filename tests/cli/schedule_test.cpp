// SPDX-License-Identifier: Apache-2.0
// `lockstep schedule` as a user meets it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>

#include "lockstep/schedule/render/render.h"
#include "tests/support/says.h"
#include "tests/support/subprocess.h"

namespace lockstep::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;
using Words = std::vector<std::string>;

Result command(Words words, const Words& more = {}) {
  words.insert(words.begin(), "schedule");
  words.insert(words.end(), more.begin(), more.end());
  return lockstep_command(words);
}

const Words kSmall = {"--kind", "1f1b", "--stages", "2", "--microbatches", "2"};

TEST(ScheduleCommand, Text) {
  const Result result = command(kSmall);
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.out,
              AllOf(StartsWith("1f1b: 2 ranks, 2 micro-batches, 1 chunk per rank\n"
                               "rank 0: F0 F1 B0 B1\nrank 1: F0 B0 F1 B1\nmakespan 9\n"),
                    HasSubstr("peak live 2 1\n")));
  // 1f1b is the kind that training takes too.
  EXPECT_EQ(command({"--stages", "2", "--microbatches", "2"}).out, result.out);
}

TEST(ScheduleCommand, CostsAndHops) {
  const auto makespan = [](const Words& more) {
    const Result result = command({"--stages", "2", "--microbatches", "2"}, more);
    EXPECT_EQ(result.code, 0) << result.err;
    return result.out.substr(result.out.find("makespan"),
                             result.out.find("\nspans") - result.out.find("makespan"));
  };
  EXPECT_EQ(makespan({"--cost", "F=2"}), "makespan 12");
  EXPECT_EQ(makespan({"--cost", "B=1"}), "makespan 6");
  EXPECT_EQ(makespan({"--cost", "F=0.5,I=1,W=0.25"}), "makespan 5.25");
  EXPECT_EQ(makespan({"--hop", "0.5"}), "makespan 10");
  EXPECT_EQ(makespan({"--kind", "zb-h1", "--cost", "I=2"}), "makespan 10");
  EXPECT_EQ(makespan({"--kind", "zb-h1", "--cost", "W=2"}), "makespan 9");
}

TEST(ScheduleCommand, LoweredTextShowsSendsAndReceives) {
  EXPECT_THAT(command(kSmall, {"--lower"}).out,
              AllOf(HasSubstr("rank 0: F0 SA0 RG0 F1 SA1 RG1 B0 B1\n"), HasSubstr("makespan 9\n")));
}

TEST(ScheduleCommand, JsonAndSvg) {
  const auto json = nlohmann::json::parse(command(kSmall, {"--format", "json"}).out);
  EXPECT_EQ(json.at("kind"), "1f1b");
  EXPECT_EQ(json.at("ops").at(1), "F0 B0 F1 B1");
  EXPECT_THAT(command(kSmall, {"--format", "svg"}).out,
              AllOf(StartsWith("<svg"), HasSubstr("1f1b: 2 ranks")));
}

TEST(ScheduleCommand, AFileItWroteIsOneItReads) {
  const TempDir dir;
  const std::string path = dir.path() + "/x.csv";
  write_file(path, "what was there");
  const Words v = {"--kind", "zb-v", "--stages", "3", "--microbatches", "6", "--chunks", "2"};
  const Result written = command(v, {"--format", "csv", "--output", path});
  EXPECT_EQ(written.code, 0) << written.err;
  EXPECT_EQ(written.out, "");
  EXPECT_EQ(read_file(path), to_csv(schedule::generate({schedule::Kind::zb_v, 3, 6, 2})));
  const Result read = command({"--kind", "file", "--file", path, "--chunks", "2"});
  EXPECT_EQ(read.code, 0) << read.err;
  const std::string of_kind = command(v).out;
  EXPECT_EQ(read.out.substr(read.out.find('\n')), of_kind.substr(of_kind.find('\n')));
  EXPECT_THAT(command({"--kind", "file", "--file", path, "--stages", "4"}).err,
              HasSubstr("x.csv: ranks is 3 in the file, but must be 4"));
}

TEST(ScheduleCommand, WrongUseIsOneLine) {
  const TempDir dir;
  const std::pair<Result, const char*> cases[] = {
      {command({"--kind", "1F1B", "--stages", "2", "--microbatches", "2"}),
       "'1F1B' ... round-robin, sequential"},
      {command({"--microbatches", "2"}), "--stages is required"},
      {command({"--stages", "2"}), "--microbatches is required"},
      {command({"--stages", "x", "--microbatches", "2"}), "'x' ... whole number"},
      {command({"--stages", "0", "--microbatches", "2"}), "ranks is 0 ... at least 1"},
      {command(kSmall, {"--chunks", "2"}), "chunks is 2 ... 1f1b ... one chunk"},
      {command(kSmall, {"--group", "2"}), "only interleaved and zb-1p have groups"},
      {command(kSmall, {"--file", "x"}), "file is x ... kind file"},
      {command({"--kind", "file"}), "[schedule] file ... named"},
      {command({"--kind", "file", "--file", dir.path() + "/none"}), "none: No such file"},
      {command(kSmall, {"--cost", "F=x"}), "--cost F is 'x' ... number, 0 or more"},
      {command(kSmall, {"--cost", "F=-1"}), "--cost F is '-1' ... number, 0 or more"},
      {command(kSmall, {"--cost", "G=1"}), "--cost has 'G=1', must be F=, B=, I= or W="},
      {command(kSmall, {"--cost", "F=1,,W=2"}), "--cost has ''"},
      {command(kSmall, {"--hop", "inf"}), "--hop is 'inf' ... number, 0 or more"},
      {command(kSmall, {"--format", "png"}), "'png' ... text, csv, json, svg"},
      {command(kSmall, {"--lower", "--format", "csv"}), "--lower is for --format text, not csv"},
      {command(kSmall, {"--step", "3"}), "--step ... --trace"},
      {command(kSmall, {"--trace", dir.path()}), "--trace and --kind exclude each other"},
      {command({"--trace", dir.path(), "--lower"}), "--trace and --lower exclude each other"},
      {command({"--trace", dir.path() + "/none"}), "none ... not a folder"},
      {command({"--trace", dir.path()}), "pipeline ... parallel.pp ... --metrics.trace"}};
  for (const auto& [result, words] : cases) {
    EXPECT_EQ(result.code, 2) << words;
    EXPECT_THAT(result.err, says(words));
    EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
  }
  const Result unwritable = command(kSmall, {"--output", dir.path() + "/none/x"});
  EXPECT_EQ(unwritable.code, 1);
  EXPECT_THAT(unwritable.err, HasSubstr("none/x: No such file"));
}

// Traces of two ranks: one file each, times in microseconds.
class ScheduleTrace : public ::testing::Test {
 protected:
  void event(int pid, const std::string& name, double start, double end, const std::string& args,
             const std::string& category = "pipeline") {
    text_[pid] += "{\"ph\":\"X\",\"cat\":\"" + category + "\",\"name\":\"" + name +
                  "\",\"pid\":" + std::to_string(pid) +
                  ",\"tid\":1,\"ts\":" + std::to_string(start) +
                  ",\"dur\":" + std::to_string(end - start) + ",\"args\":{" + args + "}},\n";
  }
  // Of 1f1b with two ranks and two micro-batches; the first gradient takes rank 0 longer. `unit` is
  // the time of a forward.
  void step(int number, double at, int first_pid = 0, int dp = 0, double unit = 1000) {
    const auto add = [&](int rank, const std::string& name, double start, double end) {
      event(first_pid + rank, name, at + start * unit, at + end * unit,
            "\"stage\":" + std::to_string(rank) + ",\"rank\":" + std::to_string(rank) +
                ",\"step\":" + std::to_string(number) + ",\"dp\":" + std::to_string(dp));
    };
    add(0, "F0.0", 0, 1);
    add(0, "F1.0", 1, 2);
    add(0, "SA0.0", 1, 9);
    add(0, "B0.0", 4, 7);
    add(0, "B1.0", 7, 9);
    add(1, "F0.0", 1, 2);
    add(1, "B0.0", 2, 4);
    add(1, "F1.0", 4, 5);
    add(1, "B1.0", 5, 7);
  }
  Result show(const Words& more = {}) {
    for (const auto& [pid, text] : text_) {
      write_file(dir_.path() + "/rank" + std::to_string(pid) + ".json", "[\n" + text);
    }
    return command({"--trace", dir_.path()}, more);
  }

  TempDir dir_;
  std::map<int, std::string> text_;
};

TEST_F(ScheduleTrace, TheLastCompleteStep) {
  step(1, 5e9);
  step(2, 6e9);
  step(2, 7e9, 2, 1);  // another replica
  event(0, "matmul", 0, 1e9, "\"step\":2", "op");
  event(0, "F0.0", 8e9, 8e9 + 1, "\"stage\":0,\"rank\":0,\"step\":3,\"dp\":0");
  text_[1] += "{\"ph\":\"X\",\"cat\":\"pipeline\",\"name\":\"B1";  // killed here
  const Result result = show();
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(result.out,
            "step 2 as measured: data-parallel replica 0 of 2, 2 ranks, 2 micro-batches, 1 chunk "
            "per rank; times in ms\n"
            "rank  mean F  mean B      span  peak live\n"
            "   0   1.000   2.500     9.000          2\n"
            "   1   1.000   2.000     6.000          1\n"
            "makespan 9.000\n"
            "bubble 0.277778 of the makespan, 0.277778 of the longest span\n");
  EXPECT_THAT(show({"--step", "1"}).out, StartsWith("step 1 as measured"));
  const auto json = nlohmann::json::parse(show({"--format", "json"}).out);
  EXPECT_EQ(json.at("kind"), "measured");
  EXPECT_EQ(json.at("step"), 2);
  EXPECT_EQ(json.at("makespan"), 9.0);
  EXPECT_EQ(json.at("span"), (nlohmann::json{9.0, 6.0}));
  EXPECT_EQ(json.at("ops").at(0), "F0 F1 B0 B1");
  EXPECT_THAT(show({"--format", "svg"}).out,
              AllOf(HasSubstr("step 2 as measured: 2 ranks"), HasSubstr("makespan 9 ms"),
                    HasSubstr("time, ms"), HasSubstr("B0 4 to 7")));
  const Result incomplete = show({"--step", "3"});
  EXPECT_EQ(incomplete.code, 2);
  EXPECT_THAT(incomplete.err, HasSubstr("step 3 is not complete"));
  EXPECT_THAT(show({"--step", "7"}).err, says("--step is 7 ... steps 1 to 3"));
}

TEST_F(ScheduleTrace, RanksOfOtherAxesAreNotMixedIn) {
  step(1, 0, 0, 1, 3000);  // another replica
  step(1, 0, 2, 0);
  step(1, 100, 4, 0, 2000);  // the same places again, of the same replica
  EXPECT_THAT(show().out, HasSubstr("makespan 9.000\n"));
}

TEST_F(ScheduleTrace, OfARunFolder) {
  step(1, 0);
  const std::string direct = show().out;
  EXPECT_THAT(direct, AllOf(HasSubstr("makespan 9.000"), Not(HasSubstr("replica"))));
  std::filesystem::create_directory(dir_.path() + "/traces");
  for (const auto& [pid, text] : text_) {
    const std::string name = "/rank" + std::to_string(pid) + ".json";
    std::filesystem::rename(dir_.path() + name, dir_.path() + "/traces" + name);
  }
  EXPECT_EQ(command({"--trace", dir_.path()}).out, direct);
}

// A folder that was used before.
TEST_F(ScheduleTrace, RunsAreNotMixed) {
  const auto write = [&](const std::string& run) {
    for (const auto& [pid, text] : text_)
      write_file(dir_.path() + "/" + run + "-rank" + std::to_string(pid) + ".json", "[\n" + text);
    text_.clear();
  };
  step(1, 0, 0, 0, 3000);
  step(2, 1e9, 0, 0, 3000);
  write("runfeed");
  step(1, 2e9);
  write("run0123");
  const auto path = [&](const char* name) { return std::filesystem::path(dir_.path()) / name; };
  const auto now = std::filesystem::last_write_time(path("run0123-rank0.json"));
  const auto set_age = [&](const char* run, int hours) {
    for (const char* rank : {"-rank0.json", "-rank1.json"})
      std::filesystem::last_write_time(path((std::string(run) + rank).c_str()),
                                       now - std::chrono::hours(hours));
  };
  set_age("runfeed", 2);
  EXPECT_THAT(show().out, AllOf(HasSubstr("step 1 as measured in the newest of 2 runs"),
                                HasSubstr("makespan 9.000\n")));
  set_age("run0123", 3);
  EXPECT_THAT(show().out, AllOf(HasSubstr("step 2 as measured"), HasSubstr("makespan 27.000\n")));
}

TEST_F(ScheduleTrace, StagesInAV) {
  const auto add = [&](int rank, const std::string& name, int stage, double start) {
    event(rank, name, start, start + 1000,
          "\"stage\":" + std::to_string(stage) + ",\"rank\":" + std::to_string(rank) +
              ",\"step\":0,\"dp\":0");
  };
  add(0, "F0.0", 0, 0);
  add(1, "F0.0", 1, 1000);
  add(1, "F0.1", 2, 2000);
  add(0, "F0.1", 3, 3000);
  add(0, "B0.1", 3, 4000);
  add(1, "B0.1", 2, 5000);
  add(1, "B0.0", 1, 6000);
  add(0, "B0.0", 0, 7000);
  const Result result = show();
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(show({"--format", "csv"}).out, StartsWith("placement,v\nF0.0,F0.1,B0.1,B0.0\n"));
}

TEST_F(ScheduleTrace, NoStepIsComplete) {
  event(0, "F0.0", 0, 1, "\"stage\":0,\"rank\":0,\"step\":4");
  EXPECT_THAT(show().err, says("[schedule] file: rank 0: B0 is missing"));
  text_.clear();
  event(0, "F0.0", 0, 1, "\"stage\":0");
  const Result result = show();
  EXPECT_EQ(result.code, 2);
  EXPECT_THAT(result.err, HasSubstr("rank0.json"));
}

}  // namespace
}  // namespace lockstep::test
