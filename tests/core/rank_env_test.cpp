// SPDX-License-Identifier: Apache-2.0
#include "lockstep/core/rank_env.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <string>

#include "lockstep/core/error.h"
#include "tests/support/says.h"

namespace lockstep {
namespace {

using test::says;
using testing::AllOf;
using testing::HasSubstr;
using testing::ThrowsMessage;

using Variables = std::map<std::string, std::string>;

const Variables kTorchrun = {{"RANK", "5"},
                             {"WORLD_SIZE", "8"},
                             {"LOCAL_RANK", "1"},
                             {"LOCAL_WORLD_SIZE", "4"},
                             {"MASTER_ADDR", "10.0.0.1"},
                             {"MASTER_PORT", "29400"},
                             {"TORCHELASTIC_RESTART_COUNT", "2"}};
const Variables kOpenMpi = {{"OMPI_COMM_WORLD_RANK", "3"},
                            {"OMPI_COMM_WORLD_SIZE", "4"},
                            {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                            {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}};
const Variables kMvapich = {{"MV2_COMM_WORLD_RANK", "6"},
                            {"MV2_COMM_WORLD_SIZE", "7"},
                            {"MV2_COMM_WORLD_LOCAL_RANK", "0"},
                            {"MV2_COMM_WORLD_LOCAL_SIZE", "3"}};
const Variables kMpich = {
    {"PMI_RANK", "2"}, {"PMI_SIZE", "6"}, {"MPI_LOCALRANKID", "2"}, {"MPI_LOCALNRANKS", "3"}};
const Variables kPmix = {
    {"PMIX_RANK", "9"}, {"SLURM_STEP_NUM_TASKS", "16"}, {"SLURM_STEP_NODELIST", "gpu[07-08]"}};
const Variables kSlurm = {{"SLURM_PROCID", "3"},
                          {"SLURM_NTASKS", "99"},
                          {"SLURM_STEP_NUM_TASKS", "4"},
                          {"SLURM_STEP_ID", "0"},
                          {"SLURM_LOCALID", "1"},
                          {"SLURM_JOB_ID", "1234567"},
                          {"SLURM_JOB_NAME", "train"},
                          {"SLURM_JOB_NODELIST", "node[001-009]"},
                          {"SLURM_STEP_NODELIST", "node[003-004]"}};

Variables operator+(Variables a, const Variables& b) {
  a.insert(b.begin(), b.end());
  return a;
}

Variables without(Variables variables, const std::string& name) {
  variables.erase(name);
  return variables;
}

Variables with(Variables variables, const std::string& name, const std::string& value) {
  variables[name] = value;
  return variables;
}

RankEnv detect(const Variables& variables) {
  return RankEnv::detect([&](const char* name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional(found->second);
  });
}

void expect_ranks(const RankEnv& env, int rank, int size, Launcher launcher) {
  EXPECT_EQ(env.rank, rank);
  EXPECT_EQ(env.world_size, size);
  EXPECT_EQ(env.launcher, launcher) << name_of(env.launcher);
}

TEST(RankEnv, NoLauncherIsOneProcess) {
  const auto env = detect({});
  expect_ranks(env, 0, 1, Launcher::none);
  EXPECT_EQ(env.local_rank, std::nullopt);
  EXPECT_EQ(env.local_size, std::nullopt);
  EXPECT_EQ(env.master_addr, "");
  EXPECT_EQ(env.master_port, 0);
  EXPECT_EQ(env.restart_count, 0);
}

TEST(RankEnv, Torchrun) {
  const auto env = detect(kTorchrun);
  expect_ranks(env, 5, 8, Launcher::torchrun);
  EXPECT_EQ(env.local_rank, 1);
  EXPECT_EQ(env.local_size, 4);
  EXPECT_EQ(env.master_addr, "10.0.0.1");
  EXPECT_EQ(env.master_port, 29400);
  EXPECT_EQ(env.restart_count, 2);
}

TEST(RankEnv, AnAddressInBracketsIsTheOneInside) {
  Variables variables = kTorchrun;
  variables["MASTER_ADDR"] = "[fd00::1]";
  EXPECT_EQ(detect(variables).master_addr, "fd00::1");
}

TEST(RankEnv, OurLauncherSetsTheSameVariablesAndItsOwn) {
  expect_ranks(detect(kTorchrun + Variables{{"LOCKSTEP_RENDEZVOUS", "127.0.0.1:5000"}}), 5, 8,
               Launcher::lockstep);
}

TEST(RankEnv, OpenMpi) {
  const auto env = detect(kOpenMpi);
  expect_ranks(env, 3, 4, Launcher::openmpi);
  EXPECT_EQ(env.local_rank, 1);
  EXPECT_EQ(env.local_size, 2);
}

TEST(RankEnv, Mvapich) {
  const auto env = detect(kMvapich);
  expect_ranks(env, 6, 7, Launcher::mvapich);
  EXPECT_EQ(env.local_rank, 0);
  EXPECT_EQ(env.local_size, 3);
}

TEST(RankEnv, Mpich) {
  const auto env = detect(kMpich);
  expect_ranks(env, 2, 6, Launcher::mpich);
  EXPECT_EQ(env.local_rank, 2);
  EXPECT_EQ(env.local_size, 3);
}

TEST(RankEnv, PmixTakesTheSizeFromSlurm) {
  const auto env = detect(kPmix);
  expect_ranks(env, 9, 16, Launcher::pmix);
  EXPECT_EQ(env.master_addr, "gpu07");
  // PMIx alone does not say how many ranks there are.
  expect_ranks(detect({{"PMIX_RANK", "9"}}), 0, 1, Launcher::none);
}

TEST(RankEnv, SlurmStep) {
  const auto env = detect(kSlurm);
  expect_ranks(env, 3, 4, Launcher::slurm);
  EXPECT_EQ(env.local_rank, 1);
  EXPECT_EQ(env.master_addr, "node003") << "the step's nodes, not the job's";
  EXPECT_EQ(env.master_port, 15000 + 4567);
  EXPECT_NE(
      detect(without(kSlurm, "SLURM_STEP_ID") + Variables{{"SLURM_STEP_ID", "1"}}).master_port,
      env.master_port)
      << "two steps of a job have a port each";

  const auto given = detect(kSlurm + Variables{{"MASTER_ADDR", "head"}, {"MASTER_PORT", "4000"}});
  EXPECT_EQ(given.master_addr, "head");
  EXPECT_EQ(given.master_port, 4000);
}

TEST(RankEnv, SlurmStepWithoutItsOwnCountUsesTheJobs) {
  expect_ranks(detect(without(kSlurm, "SLURM_STEP_NUM_TASKS")), 3, 99, Launcher::slurm);
  EXPECT_EQ(detect(without(kSlurm, "SLURM_STEP_NODELIST")).master_addr, "node001");
}

// The batch script itself runs as one process, although Slurm sets a rank and a size for it.
TEST(RankEnv, SbatchWithoutSrunIsOneProcess) {
  expect_ranks(detect({{"SLURM_PROCID", "0"},
                       {"SLURM_NTASKS", "8"},
                       {"SLURM_LOCALID", "0"},
                       {"SLURM_JOB_NAME", "train"},
                       {"SLURM_JOB_NODELIST", "node[1-2]"}}),
               0, 1, Launcher::none);
  // An interactive shell is a step of its own.
  expect_ranks(detect(with(kSlurm, "SLURM_JOB_NAME", "bash")), 0, 1, Launcher::none);
  expect_ranks(detect(with(kSlurm, "SLURM_JOB_NAME", "interactive")), 0, 1, Launcher::none);
}

TEST(RankEnv, FirstCompleteSetWins) {
  auto all = kTorchrun + kOpenMpi + kMvapich + kMpich + kPmix + kSlurm;
  EXPECT_EQ(detect(all).launcher, Launcher::torchrun);
  all = without(all, "RANK");
  EXPECT_EQ(detect(all).launcher, Launcher::openmpi);
  EXPECT_EQ(detect(all).rank, 3);
  all = without(all, "OMPI_COMM_WORLD_SIZE");
  EXPECT_EQ(detect(all).launcher, Launcher::mvapich);
  all = without(all, "MV2_COMM_WORLD_RANK");
  EXPECT_EQ(detect(all).launcher, Launcher::mpich);
  all = without(all, "PMI_SIZE");
  EXPECT_EQ(detect(all).launcher, Launcher::pmix);
  all = without(all, "PMIX_RANK");
  EXPECT_EQ(detect(all).launcher, Launcher::slurm);
  all = without(all, "SLURM_PROCID");
  EXPECT_EQ(detect(all).launcher, Launcher::none);
}

TEST(RankEnv, WorldSizeAloneIsNoLauncher) {
  expect_ranks(detect({{"WORLD_SIZE", "8"}}), 0, 1, Launcher::none);
  expect_ranks(detect({{"RANK", "3"}}), 0, 1, Launcher::none);
}

TEST(RankEnv, EmptyVariablesAreUnset) {
  expect_ranks(detect(with(kTorchrun, "RANK", "")), 0, 1, Launcher::none);
  expect_ranks(detect(with(kTorchrun, "RANK", "") + kMpich), 2, 6, Launcher::mpich);
}

TEST(RankEnv, MissingLocalRankStaysUnknown) {
  const auto env = detect({{"RANK", "1"}, {"WORLD_SIZE", "2"}});
  expect_ranks(env, 1, 2, Launcher::torchrun);
  EXPECT_EQ(env.local_rank, std::nullopt) << "never derived from the rank";
}

TEST(RankEnv, ContradictionsAreErrors) {
  EXPECT_THAT([] { detect(with(kTorchrun, "RANK", "8")); },
              ThrowsMessage<ConfigError>(
                  AllOf(HasSubstr("RANK=8"), HasSubstr("WORLD_SIZE=8"), says("world size"))));
  EXPECT_THROW(detect(with(kTorchrun, "RANK", "-1")), ConfigError);
  EXPECT_THROW(detect(with(kTorchrun, "WORLD_SIZE", "0")), ConfigError);
  EXPECT_THAT([] { detect(with(kTorchrun, "LOCAL_RANK", "4")); },
              ThrowsMessage<ConfigError>(
                  AllOf(HasSubstr("LOCAL_RANK=4"), HasSubstr("LOCAL_WORLD_SIZE=4"))));
  EXPECT_THAT([] { detect(with(kOpenMpi, "OMPI_COMM_WORLD_RANK", "4")); },
              ThrowsMessage<ConfigError>(HasSubstr("OMPI_COMM_WORLD_RANK=4")));
  EXPECT_THROW(detect(with(kSlurm, "SLURM_PROCID", "4")), ConfigError);
  EXPECT_THROW(detect(with(kPmix, "PMIX_RANK", "16")), ConfigError);
}

TEST(RankEnv, NumbersMustBeNumbers) {
  for (const char* text : {"three", "3x", "0x3", "3.0", " 3", "99999999999"}) {
    EXPECT_THAT([&] { detect(with(kTorchrun, "RANK", text)); },
                ThrowsMessage<ConfigError>(
                    AllOf(HasSubstr(std::string("RANK=") + text), says("whole number"))));
  }
  EXPECT_THROW(detect(with(kTorchrun, "MASTER_PORT", "http")), ConfigError);
}

TEST(RankEnv, ReadsTheRealEnvironment) {
  ASSERT_EQ(setenv("RANK", "1", 1), 0);
  ASSERT_EQ(setenv("WORLD_SIZE", "3", 1), 0);
  const auto env = RankEnv::detect();
  unsetenv("RANK");
  unsetenv("WORLD_SIZE");
  EXPECT_EQ(env.rank, 1);
  EXPECT_EQ(env.world_size, 3);
}

TEST(RankEnv, LauncherNames) {
  EXPECT_EQ(name_of(Launcher::none), "none");
  EXPECT_EQ(name_of(Launcher::lockstep), "lockstep");
  EXPECT_EQ(name_of(Launcher::mpich), "MPICH");
  EXPECT_EQ(name_of(Launcher::slurm), "Slurm");
}

TEST(SlurmHosts, FirstHost) {
  EXPECT_EQ(first_slurm_host("node[001-004,007],other"), "node001");
  EXPECT_EQ(first_slurm_host("a1,b2"), "a1");
  EXPECT_EQ(first_slurm_host("rack[1-2]n[01-03]"), "rack1n01");
  EXPECT_EQ(first_slurm_host("rack[1-2]n[01-03],x"), "rack1n01");
  EXPECT_EQ(first_slurm_host("single"), "single");
  EXPECT_EQ(first_slurm_host("node[007]"), "node007");
  EXPECT_EQ(first_slurm_host("node[12,3-4]-ib"), "node12-ib");
  EXPECT_EQ(first_slurm_host("gpu-node-3,gpu-node-4"), "gpu-node-3");
  EXPECT_EQ(first_slurm_host("login-[05-09].site.org"), "login-05.site.org");
  EXPECT_EQ(first_slurm_host(""), "");
}

}  // namespace
}  // namespace lockstep
