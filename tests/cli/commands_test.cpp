// The commands as a user meets them: what they print, and what they say of wrong options.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

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
    EXPECT_EQ(row.size(), 9u);
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
  EXPECT_THAT(result.out, HasSubstr("backend  op"));
  EXPECT_THAT(result.out, HasSubstr("shm      all_reduce      symmetric"));
}

// One line, exit status 2, and no rank was started: ranks would put their number before the line.
TEST(Commands, WrongOptionsAreOneLine) {
  const std::pair<std::vector<std::string>, std::string> cases[] = {
      {{"selftest", "-n", "0"}, "selftest: -n is 0, must be at least 1"},
      {{"selftest", "--backend", "pigeon"}, "--backend: pigeon not in {thread,shm,mpi,gloo}"},
      {{"bench", "collectives", "--ops", "juggle"}, "--ops: juggle not in {all_reduce,"},
      {{"bench", "collectives", "--bytes", "-4"}, "--bytes: Value -4 not in range 1 to"},
      {{"bench", "collectives", "--bytes", "many"}, "--bytes: Value many not in range"},
      {{"bench", "everything"}, "bench: 'everything' is not known"},
      {{"selftest", "--fast"}, "--fast"},
      {{"dance"}, "unknown command 'dance'"}};
  for (const auto& [arguments, words] : cases) {
    const Result result = lockstep_command(arguments);
    EXPECT_EQ(result.code, 2) << words;
    EXPECT_THAT(result.err, HasSubstr(words));
    EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
    EXPECT_TRUE(result.err.starts_with("lockstep: ")) << result.err;
  }
}

}  // namespace
}  // namespace lockstep::test
