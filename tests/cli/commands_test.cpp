// SPDX-License-Identifier: Apache-2.0
// The commands as a user meets them: what they print, and what they say of wrong options.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <sstream>

#include "tests/support/says.h"
#include "tests/support/subprocess.h"

namespace lockstep::test {
namespace {

using ::testing::HasSubstr;

TEST(Commands, BenchPrintsOneArray) {
  std::vector<std::string> backends{"shm", "thread", "gloo"};
#ifdef LOCKSTEP_MPIRUN
  backends.push_back("mpi");
#endif
  std::string list;
  for (const std::string& backend : backends) list += (list.empty() ? "" : ",") + backend;
  const Result result =
      lockstep_command({"bench", "collectives", "-n", "2", "--backends", list, "--ops",
                        "all_reduce,send_recv", "--bytes", "4096", "--seconds", "0.01", "--json"});
  ASSERT_EQ(result.code, 0) << result.err;
  const auto rows = nlohmann::json::parse(result.out);
  ASSERT_EQ(rows.size(), 2 * (backends.size() + 1));  // shm is measured in both kinds of memory
  for (const auto& row : rows) {
    EXPECT_EQ(row.size(), 11u);
    EXPECT_EQ(row["strategy"], "all-reduce");
    EXPECT_EQ(row["ratio"], 1);
    EXPECT_EQ(row["bytes"], 4096);
    EXPECT_EQ(row["ranks"], 2);
    EXPECT_GT(row["p50_us"], 0);
    EXPECT_GE(row["p99_us"], row["p50_us"]);
    EXPECT_NEAR(row["algbw_gbs"], 4096 / row["p50_us"].get<double>() / 1e3, 1e-9);
    EXPECT_GT(row["busbw_gbs"], 0);
  }
  EXPECT_EQ(rows[0]["memory"], "symmetric");
  EXPECT_EQ(rows[1]["memory"], "ordinary");
}

TEST(Commands, BenchPrintsATable) {
  const Result result =
      lockstep_command({"bench", "collectives", "--bytes", "64", "--seconds", "0.01"});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("backend  strategy"));
  EXPECT_THAT(result.out, HasSubstr("shm      all-reduce    all_reduce      symmetric"));
}

// A machine is measured, a layout is planned and tried with these numbers, and the run is compared
// with its prediction.
TEST(Commands, AMeasuredMachineAPlannedRunAndTheirComparison) {
  const TempDir folder;
  const std::string machine = folder.path() + "/machine.toml", run = folder.path() + "/run";
  const std::vector<std::string> variables{"LOCKSTEP_MACHINE=" + machine, "OMP_NUM_THREADS=1"};
  const Result measured = lockstep_command(
      {"bench", "machine", "-n", "2", "--seconds", "0", "--no-strategies"}, variables);
  ASSERT_EQ(measured.code, 0) << measured.err;
  EXPECT_THAT(measured.out, HasSubstr("devices_per_node = 2"));
  write_file(folder.path() + "/text.txt", std::string(20000, 'x') + "some text");
  const auto train = [&](const std::vector<std::string>& more) {
    std::vector<std::string> words{"train",
                                   "-n",
                                   "2",
                                   "--data.path",
                                   folder.path() + "/text.txt",
                                   "--train.device",
                                   "cpu",
                                   "--train.threads",
                                   "1",
                                   "--model.layers",
                                   "2",
                                   "--model.hidden",
                                   "32",
                                   "--model.heads",
                                   "2",
                                   "--train.seq_len",
                                   "32",
                                   "--train.steps",
                                   "12",
                                   "--train.global_batch",
                                   "4",
                                   "--checkpoint.every",
                                   "0"};
    words.insert(words.end(), more.begin(), more.end());
    return lockstep_command(words, variables);
  };
  const Result trained =
      train({"--run.dir", run, "--parallel.auto", "true", "--parallel.try", "2"});
  ASSERT_EQ(trained.code, 0) << trained.err;
  EXPECT_THAT(trained.err, HasSubstr("the fastest of 2 that were tried"));
  EXPECT_THAT(trained.out, HasSubstr("step 12/12"));
  const Result compared = lockstep_command({"plan", "compare", run, "--json"}, variables);
  ASSERT_EQ(compared.code, 0) << compared.err;
  const auto json = nlohmann::json::parse(compared.out);
  EXPECT_GT(json["measured"]["step_ms"], 0);
  EXPECT_EQ(json["measured"]["split"].size(), json["predicted"]["split"].size());
  EXPECT_EQ(json["predicted"]["ranks"], 2);
  // Without -n there is nothing to choose between, and what is fixed is kept.
  const Result fixed = train({"--run.dir", "", "--parallel.auto", "true", "--parallel.pp", "2"});
  ASSERT_EQ(fixed.code, 0) << fixed.err;
  EXPECT_THAT(fixed.err, HasSubstr("--parallel.dp 1 --parallel.tp 1 --parallel.pp 2"));
  EXPECT_EQ(train({"--parallel.try", "2"}).code, 2);
}

// What a command said, but for warnings of ranks that waited for a core of a busy machine.
std::string without_waits(const std::string& text) {
  std::istringstream lines(text);
  std::string rest;
  for (std::string line; std::getline(lines, line);)
    if (line.find(" has waited ") == std::string::npos) rest += line + "\n";
  return rest;
}

TEST(Commands, BenchCalibratesForAdaptive) {
  const TempDir cache;
  const std::string table = cache.path() + "/lockstep/collectives.json";
  const auto bench = [&](const std::vector<std::string>& options) {
    std::vector<std::string> words{LOCKSTEP_COMMAND, "bench",       "collectives", "-n",  "2",
                                   "--bytes",        "1024,300000", "--seconds",   "0.01"};
    words.insert(words.end(), options.begin(), options.end());
    Subprocess process(words, {"XDG_CACHE_HOME=" + cache.path()});
    return process.wait(milliseconds{200'000});
  };
  const Result calibrated = bench({"--calibrate"});
  ASSERT_EQ(calibrated.code, 0) << calibrated.err;
  const auto tables = nlohmann::json::parse(read_file(table))["tables"];
  ASSERT_TRUE(tables.contains("shm 2")) << tables;
  for (const char* op : {"all_reduce", "reduce_scatter", "all_gather", "broadcast"})
    EXPECT_EQ(tables["shm 2"][op].size(), 2u) << tables;

  const Result adaptive = bench({"--strategy", "all", "--json"});
  EXPECT_EQ(adaptive.code, 0) << adaptive.err;
  EXPECT_EQ(without_waits(adaptive.err), "");
  const auto rows = nlohmann::json::parse(adaptive.out);
  std::vector<std::string> strategies;
  for (size_t i = 0; i < 5; ++i) strategies.push_back(rows[i]["strategy"]);
  EXPECT_THAT(strategies,
              testing::ElementsAre("all-reduce", "hierarchical", "ring", "tree", "adaptive"));

  // Of no use: one line that names it, and the documented default.
  const std::string good = read_file(table);
  const auto expect_ignored = [&](const std::string& text, const std::string& why) {
    write_file(table, text);
    const Result result = bench({"--strategy", "adaptive"});
    EXPECT_EQ(result.code, 0) << result.err;
    EXPECT_THAT(result.err, says(table + " is ignored ... " + why));
    const std::string said = without_waits(result.err);
    EXPECT_EQ(std::count(said.begin(), said.end(), '\n'), 1) << result.err;
  };
  expect_ignored(good.substr(0, good.size() / 2), "");
  auto foreign = nlohmann::json::parse(good);
  foreign["machine"] = "elsewhere, 3 cores";
  expect_ignored(foreign.dump(), "measured on \"elsewhere, 3 cores\"");
}

TEST(Commands, SelftestSaysWhatRanAndWhatHolds) {
  const auto expect = [](const Result& result, const std::string& backend) {
    EXPECT_EQ(result.code, 0) << result.err;
    for (const std::string& part :
         {std::string("lockstep 0."), std::string(", libtorch "), std::string(" core"),
          std::string("GPU"), std::string(": ranks 0-1"), "backend " + backend + ", 2 ranks",
          std::string("reduce: every root"), std::string(" ok ("), std::string("all hold")})
      EXPECT_THAT(result.out, HasSubstr(part)) << backend;
  };
  expect(lockstep_command({"selftest", "-n", "2", "--backend", "thread"}), "thread");
  // Under a launcher the ranks are its own.
  expect(lockstep_command({"run", "-n", "2", LOCKSTEP_COMMAND, "selftest", "--backend", "shm"}),
         "shm");
  // The hosts decide about the backend.
  expect(lockstep_command({"run", "-n", "2", "sh", "-c",
                           "LOCKSTEP_HOST=$RANK exec " LOCKSTEP_COMMAND " selftest"},
                          {"CUDA_VISIBLE_DEVICES="}),
         "gloo");
  const Result twice =
      lockstep_command({"run", "-n", "2", LOCKSTEP_COMMAND, "selftest", "-n", "2"});
  EXPECT_EQ(twice.code, 2);
  EXPECT_THAT(twice.err, says("ranks already ... -n"));
}

// One line, exit status 2, and no rank was started: ranks would put their number before the line.
TEST(Commands, WrongOptionsAreOneLine) {
  const std::pair<std::vector<std::string>, std::string> cases[] = {
      {{"selftest", "-n", "0"}, "selftest: -n is 0 ... at least 1"},
      {{"selftest", "--backend", "pigeon"},
       "--backend: 'pigeon' ... auto, thread, shm, mpi, gloo, nccl"},
      {{"bench", "collectives", "--ops", "juggle"}, "--ops: 'juggle' ... all_reduce"},
      {{"bench", "collectives", "--bytes", "-4"}, "--bytes: -4 ... whole number ... 1 to"},
      {{"bench", "collectives", "--bytes", "many"}, "--bytes: many ... whole number ... 1 to"},
      {{"bench", "collectives", "--strategy", "star"}, "'star' ... all-reduce"},
      {{"bench", "everything"}, "bench: unknown subcommand 'everything'"},
      {{"selftest", "--fast"}, "unknown argument --fast"},
      {{"selftest", "-n", "two"}, "-n: 'two' ... whole number"},
      {{"selftest", "-n"}, "-n takes one value"},
      {{"dance"}, "unknown command 'dance'"}};
  for (const auto& [arguments, words] : cases) {
    const Result result = lockstep_command(arguments);
    EXPECT_EQ(result.code, 2) << words;
    EXPECT_THAT(result.err, says(words));
    EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
    EXPECT_TRUE(result.err.starts_with("lockstep: ")) << result.err;
  }
}

}  // namespace
}  // namespace lockstep::test
