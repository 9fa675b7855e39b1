// SPDX-License-Identifier: Apache-2.0
// `lockstep plan time` and `lockstep plan layout`, as their users meet them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <sstream>

#include "tests/support/says.h"
#include "tests/support/subprocess.h"

namespace lockstep::test {
namespace {

using Json = nlohmann::json;
using testing::AllOf;
using testing::HasSubstr;
using Words = std::vector<std::string>;

Words operator+(Words left, const Words& right) {
  left.insert(left.end(), right.begin(), right.end());
  return left;
}

const Words kModel{
    "--model.kind",    "llama", "--model.layers", "32",       "--model.hidden", "4096",
    "--model.heads",   "32",    "--model.ffn",    "14336",    "--model.vocab",  "128000",
    "--train.seq_len", "4096",  "--train.dtype",  "bfloat16", "--train.device", "cuda"};

Result plan(const Words& verb, const Words& options) {
  return lockstep_command(Words{"plan"} + verb + kModel + options);
}

// The command ends with status 2 and one line that has these facts.
void expect_refused(const Result& result, const std::string& facts) {
  EXPECT_EQ(result.code, 2) << result.out;
  EXPECT_THAT(result.err, HasFacts(facts));
  EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
}

const Words kLayout{"--parallel.dp",       "2", "--parallel.tp",        "2", "--parallel.pp", "2",
                    "--train.micro_batch", "1", "--train.global_batch", "64"};

TEST(PlanTime, PartsAddUpToTheStep) {
  const Result result = plan({"time", "--cluster", "h100", "--json"}, kLayout);
  ASSERT_EQ(result.code, 0) << result.err;
  const Json json = Json::parse(result.out);
  double sum = 0;
  for (const auto& [name, value] : json["split"].items()) sum += value.get<double>();
  EXPECT_NEAR(sum, json["step_ms"].get<double>(), 0.01);
  for (const char* key : {"compute_ms", "communication_ms", "bubble_ms", "optimizer_ms"})
    EXPECT_GT(json["split"][key].get<double>(), 0) << key;
  EXPECT_EQ(json["layout"]["tp"], 2);
  EXPECT_EQ(json["layout"]["schedule"], "1f1b");
  EXPECT_GT(json["memory_bytes"].get<double>(), 1e10);
  EXPECT_NEAR(json["tokens_per_s"].get<double>(), 64 * 4096 / json["step_ms"].get<double>() * 1e3,
              1);
  EXPECT_GT(json["mfu"].get<double>(), 0.2);
  EXPECT_EQ(json["sensitivity"].size(), 5U);
}

// Context parallelism is as it is given; the search chooses the other axes.
TEST(PlanTime, KnowsRanksThatShareRows) {
  const Words shared{"--parallel.cp",
                     "2",
                     "--train.micro_batch",
                     "1",
                     "--train.global_batch",
                     "32",
                     "--cluster",
                     "h100",
                     "--json"};
  const Words given{"--parallel.dp", "2", "--parallel.tp", "2"};
  const Result result = plan({"time"}, given + shared);
  ASSERT_EQ(result.code, 0) << result.err;
  const Json json = Json::parse(result.out);
  EXPECT_EQ(json["layout"]["dp"], 2);
  EXPECT_EQ(json["layout"]["cp"], 2);
  EXPECT_EQ(json["ranks"], 8);
  EXPECT_GT(json["communication"]["context_ms"].get<double>(), 0);
  const Result found = plan({"layout", "-n", "16"}, shared);
  ASSERT_EQ(found.code, 0) << found.err;
  EXPECT_THAT(found.out, HasSubstr("--parallel.cp 2"));
  expect_refused(plan({"layout", "-n", "15"}, shared), "parallel.cp is 2 ... 15");
  expect_refused(plan({"layout", "-n", "16"}, shared + Words{"--train.seq_len", "4098"}),
                 "train.seq_len is 4098 ... 4100");
}

TEST(PlanTime, ForPeople) {
  const Result result = plan({"time", "--cluster", "a100"}, kLayout);
  ASSERT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.out,
              AllOf(HasSubstr("A100 node"), HasSubstr("not measured"), HasSubstr("bubble"),
                    HasSubstr("MFU"), HasSubstr("HFU"), HasSubstr("twice the network")));
}

TEST(PlanTime, RowsOfAFile) {
  const TempDir folder;
  const std::string rows = folder.path() + "/rows.csv";
  write_file(rows,
             "parallel.dp,parallel.tp,parallel.pp,parallel.split\n4,2,1,\n2,2,2,16 18\n2,3,1,\n");
  const Result result =
      plan({"time", "--rows", rows, "--memory", "--cluster", "h100", "--cluster", "a100"},
           {"--train.micro_batch", "1", "--train.global_batch", "64"});
  ASSERT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.out, AllOf(HasSubstr("refused,parameters"), HasSubstr("step_ms_1"),
                                HasSubstr("divisible by parallel.tp 3")));
  EXPECT_EQ(std::count(result.out.begin(), result.out.end(), '\n'), 4);
}

TEST(PlanTime, AClusterOfAFile) {
  const TempDir folder;
  const std::string path = folder.path() + "/mine.toml";
  const auto ask = [&](const std::string& text) {
    write_file(path, text);
    return plan({"time", "--cluster", path, "--json"}, kLayout);
  };
  const std::string whole =
      "[device]\nflops = 1e14\nmemory = 8e10\nbandwidth = 1e12\n[links]\nhost_bandwidth = 1e11\n";
  expect_refused(ask(whole), "mine.toml ... links.network_bandwidth ... missing ... above 0");
  expect_refused(ask(whole + "network_bandwidth = -3\n"),
                 "mine.toml:7 ... links.network_bandwidth is -3 ... above 0");
  expect_refused(ask("[cluster]\nbase = \"x100\"\n"), "x100 ... a100, h100, h200");
  EXPECT_EQ(ask(whole + "network_bandwidth = 1e10\n").code, 0);
  const double before = Json::parse(ask("[cluster]\nbase = \"h100\"\n").out)["step_ms"];
  const double after =
      Json::parse(ask("[cluster]\nbase = \"h100\"\n[device]\nflops = 4e14\n").out)["step_ms"];
  EXPECT_GT(after, 1.5 * before);
}

// What all_reduce_perf of nccl-tests prints.
TEST(PlanTime, OutputOfNcclTests) {
  const TempDir folder;
  std::string text = "# nThread 1 nGpus 2\n# Using devices\n";
  for (int rank = 0; rank < 2; ++rank)
    text += "#  Rank  " + std::to_string(rank) + " Group  0 Pid 7 on node0 device  0 [0x07] GPU\n";
  text += "#       size  count type redop root time algbw busbw #wrong\n";
  text += "  1048576 262144 float sum -1 100000 0.01 0.01 0 100000 0.01 0.01 0\n";
  text += "  1073741824 268435456 float sum -1 900000 1.1 1.1 0 900000 1.1 1.1 0\n";
  write_file(folder.path() + "/all_reduce.txt", text);
  write_file(folder.path() + "/c.toml",
             "[cluster]\nbase = \"h100\"\ncollectives = \"all_reduce.txt\"\n");
  const Words tensor{"--parallel.tp", "2", "--train.micro_batch", "1"};
  const auto tensor_ms = [&](const std::string& cluster) {
    const Result result = plan({"time", "--json", "--cluster", cluster}, tensor);
    EXPECT_EQ(result.code, 0) << result.err;
    return Json::parse(result.out)["communication"]["tensor_ms"].get<double>();
  };
  // At least 0.1 s for each of 4 x 32 all-reduces.
  EXPECT_GT(tensor_ms(folder.path() + "/c.toml"), 12800);
  EXPECT_LT(tensor_ms("h100"), 1000);
}

TEST(PlanTime, AMachineFileOfAnotherHost) {
  const TempDir folder;
  const std::string path = folder.path() + "/machine.toml";
  write_file(path, "[cluster]\nbase = \"h100\"\n[machine]\nhost = \"elsewhere\"\nbuild = \"x\"\n");
  setenv("LOCKSTEP_MACHINE", path.c_str(), 1);
  const Result result = plan({"time"}, kLayout);
  unsetenv("LOCKSTEP_MACHINE");
  expect_refused(result, "machine.toml ... host elsewhere ... bench machine");
}

TEST(PlanLayout, TheBestIsAsItIsPlannedAlone) {
  const Words batch{"--train.global_batch", "64"};
  const Result result = plan({"layout", "-n", "16", "--cluster", "h100", "--json"}, batch);
  ASSERT_EQ(result.code, 0) << result.err;
  const Json list = Json::parse(result.out);
  ASSERT_GE(list.size(), 3U);
  EXPECT_LE(list[0]["step_ms"], list[2]["step_ms"]);
  EXPECT_FALSE(list[0]["explanation"].get<std::string>().empty());
  Words flags;
  std::istringstream stream(list[0]["flags"].get<std::string>());
  for (std::string word; stream >> word;) flags.push_back(word);
  const Result alone = plan({"time", "--cluster", "h100", "--json"}, flags);
  ASSERT_EQ(alone.code, 0) << alone.err;
  const Json same = Json::parse(alone.out);
  EXPECT_EQ(same["step_ms"], list[0]["step_ms"]);
  EXPECT_EQ(same["memory_bytes"], list[0]["memory_bytes"]);
  EXPECT_EQ(same["layout"], list[0]["layout"]);
}

TEST(PlanLayout, FlagsFixAnAxis) {
  const Result result =
      plan({"layout", "-n", "16", "--cluster", "h100", "--json"},
           {"--train.global_batch", "64", "--parallel.tp", "4", "--train.recompute", "full"});
  ASSERT_EQ(result.code, 0) << result.err;
  for (const Json& each : Json::parse(result.out)) {
    EXPECT_EQ(each["layout"]["tp"], 4);
    EXPECT_EQ(each["layout"]["recompute"], "full");
  }
}

TEST(PlanLayout, SaysWhyNotAnother) {
  const TempDir folder;
  const std::string svg = folder.path() + "/front.svg";
  const Result result =
      plan({"layout", "-n", "16", "--cluster", "h100", "--svg", svg, "--explain", "--parallel.tp 5",
            "--explain", "--parallel.tp 1 --train.micro_batch 1", "--explain", "--parallel.tp 16"},
           {"--train.global_batch", "64"});
  ASSERT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.out, AllOf(HasSubstr("tp 5: refused"), HasSubstr("micro_batch 1: too large"),
                                HasSubstr("tp 16: "), HasSubstr("% slower, most of it"),
                                HasSubstr("front of time and memory")));
  EXPECT_THAT(read_file(svg), AllOf(HasSubstr("<svg"), HasSubstr("</svg>")));
}

TEST(PlanLayout, FewerRanksMayDo) {
  const Result result = plan({"layout", "--max-ranks", "16", "--cluster", "h200", "--json"},
                             {"--train.global_batch", "64"});
  ASSERT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(Json::parse(result.out)[0]["ranks"], 16);
}

TEST(PlanLayout, WhatFitsNowhere) {
  expect_refused(plan({"layout", "-n", "2", "--cluster", "h100"},
                      {"--train.global_batch", "64", "--memory.max_per_device", "4GB"}),
                 "2 ranks ... 4 GB ... smallest ... -n");
  expect_refused(plan({"layout", "-n", "37", "--cluster", "h100"}, {"--train.global_batch", "64"}),
                 "37 ranks ... heads 32 ... batch 64");
  expect_refused(plan({"layout"}, {}), "missing ... -n ... --max-ranks");
  expect_refused(plan({"layout", "-n", "4", "--max-ranks", "8"}, {}), "-n 4 ... --max-ranks 8");
}

TEST(PlanCluster, IsReadAsItIsPrinted) {
  const TempDir folder;
  const Result printed = lockstep_command({"plan", "cluster", "h200"});
  ASSERT_EQ(printed.code, 0) << printed.err;
  write_file(folder.path() + "/c.toml", printed.out);
  EXPECT_EQ(lockstep_command({"plan", "cluster", folder.path() + "/c.toml"}).out, printed.out);
}

}  // namespace
}  // namespace lockstep::test
