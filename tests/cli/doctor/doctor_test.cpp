// SPDX-License-Identifier: Apache-2.0
// `lockstep doctor`: its verdicts on machines made of a few files, and the command itself.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <string>
#include <thread>

#include "lockstep/cli/doctor/checks.h"
#include "tests/support/says.h"
#include "tests/support/subprocess.h"

namespace lockstep::cli {
namespace {

namespace fs = std::filesystem;
using test::says;
using testing::AllOf;
using testing::ContainsRegex;
using testing::ElementsAre;
using testing::Field;
using testing::HasSubstr;
using testing::IsEmpty;

struct DoctorTest : testing::Test {
  test::TempDir folder;
  std::map<std::string, std::string> variables;
  Machine machine{.root = folder.path(),
                  .variable = [this](const char* name) -> std::optional<std::string> {
                    const auto found = variables.find(name);
                    return found == variables.end() ? std::nullopt : std::optional(found->second);
                  },
                  .allowed_cores = 4,
                  .online_cores = 4};

  void file(const std::string& path, const std::string& text) {
    const fs::path full = machine.root / path;
    fs::create_directories(full.parent_path());
    test::write_file(full.string(), text);
  }
};

auto finding(Verdict verdict, const std::string& text) {
  return AllOf(Field(&Finding::verdict, verdict), Field(&Finding::text, says(text)));
}

TEST_F(DoctorTest, Cores) {
  EXPECT_THAT(check_cores(machine), ElementsAre(finding(Verdict::ok, "4")));
  machine.online_cores = 16;
  EXPECT_THAT(check_cores(machine), ElementsAre(finding(Verdict::note, "bound to 4 of 16")));
}

TEST_F(DoctorTest, CpuLimitOfControlGroups) {
  file("proc/self/cgroup", "0::/job/part\n");
  file("sys/fs/cgroup/job/part/cpu.max", "max 100000\n");
  EXPECT_THAT(check_cores(machine), ElementsAre(finding(Verdict::ok, "4")));
  file("sys/fs/cgroup/job/cpu.max", "250000 100000\n");  // of the group around it
  EXPECT_THAT(check_cores(machine),
              ElementsAre(finding(Verdict::ok, "4"),
                          finding(Verdict::warning, "2.5 cores ... for 4 ... OMP_NUM_THREADS=2")));
  machine.allowed_cores = machine.online_cores = 2;
  EXPECT_THAT(check_cores(machine), ElementsAre(finding(Verdict::ok, "2")));
}

TEST_F(DoctorTest, CpuLimitOfOldControlGroups) {
  file("proc/self/cgroup", "5:cpuset:/x\n4:cpu,cpuacct:/job\n0::/\n");
  file("sys/fs/cgroup/cpu/job/cpu.cfs_period_us", "100000\n");
  file("sys/fs/cgroup/cpu/job/cpu.cfs_quota_us", "-1\n");
  EXPECT_THAT(check_cores(machine), ElementsAre(finding(Verdict::ok, "4")));
  file("sys/fs/cgroup/cpu/job/cpu.cfs_quota_us", "50000\n");
  EXPECT_THAT(check_cores(machine), ElementsAre(finding(Verdict::ok, "4"),
                                                finding(Verdict::warning, "OMP_NUM_THREADS=1")));
}

TEST_F(DoctorTest, ThreadVariables) {
  EXPECT_THAT(check_thread_variables(machine), ElementsAre(finding(Verdict::ok, "")));
  variables = {{"OMP_NUM_THREADS", "4"}};
  EXPECT_THAT(check_thread_variables(machine),
              ElementsAre(finding(Verdict::note, "OMP_NUM_THREADS=4 ... every rank")));
  variables = {{"OPENBLAS_NUM_THREADS", "8"}};
  EXPECT_THAT(check_thread_variables(machine),
              ElementsAre(finding(Verdict::warning, "OPENBLAS_NUM_THREADS=8 ... more than the 4")));
  variables = {{"OMP_PROC_BIND", "true"}, {"OMP_WAIT_POLICY", "active"}};
  EXPECT_THAT(check_thread_variables(machine),
              ElementsAre(finding(Verdict::warning, "OMP_PROC_BIND=true"),
                          finding(Verdict::warning, "OMP_WAIT_POLICY=active")));
  variables = {{"OMP_PROC_BIND", "false"}, {"OMP_WAIT_POLICY", "PASSIVE"}};
  EXPECT_THAT(check_thread_variables(machine), ElementsAre(finding(Verdict::ok, "")));
}

TEST_F(DoctorTest, Blas) {
  EXPECT_THAT(check_blas(machine), ElementsAre(finding(Verdict::ok, "none")));
  const auto points_to = [&](const std::string& target) {
    const fs::path link = machine.root / "usr/lib/some-linux-gnu/libblas.so.3";
    file("usr/lib/some-linux-gnu/" + target, "");
    fs::remove(link);
    fs::create_symlink(target, link);
    return check_blas(machine);
  };
  EXPECT_THAT(points_to("openblas-openmp/libblas.so.3"),
              ElementsAre(finding(Verdict::ok, "OpenBLAS")));
  // Only what is loaded can be wrong.
  EXPECT_THAT(points_to("blas/libblas.so.3.11.0"),
              ElementsAre(finding(Verdict::note, "reference BLAS")));
  EXPECT_THAT(points_to("openblas-pthread/libblas.so.3"),
              ElementsAre(finding(Verdict::note, "ignores thread limits")));
}

TEST(Doctor, JudgesLoadedBlas) {
  const auto verdict = [](const char* path) { return judge_blas(path).verdict; };
  EXPECT_EQ(verdict("/usr/lib/x86_64-linux-gnu/blas/libblas.so.3.11.0"), Verdict::warning);
  EXPECT_EQ(verdict("/usr/lib/x86_64-linux-gnu/openblas-pthread/libopenblasp-r0.3.21.so"),
            Verdict::warning);
  EXPECT_EQ(verdict("/usr/lib/x86_64-linux-gnu/openblas-serial/libblas.so.3"), Verdict::warning);
  EXPECT_EQ(verdict("/usr/lib/x86_64-linux-gnu/openblas-openmp/libblas.so.3"), Verdict::ok);
  EXPECT_EQ(verdict("/opt/torch/lib/libmkl_core.so.2"), Verdict::ok);
}

TEST_F(DoctorTest, Gpus) {
  EXPECT_THAT(check_gpus(machine), ElementsAre(finding(Verdict::ok, "none")));
  file("proc/driver/nvidia/version",
       "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue Sep 23 10:11:16 UTC 2025\n");
  EXPECT_THAT(check_gpus(machine), ElementsAre(finding(Verdict::warning, "--gpus all")));
  file("dev/nvidia0", "");
  file("dev/nvidiactl", "");
  file("proc/driver/nvidia/gpus/0000:01:00.0/information", "Model: \t\t NVIDIA H200\nIRQ: 1\n");
  const auto findings = check_gpus(machine);
  ASSERT_EQ(findings.size(), 1u);
  EXPECT_EQ(findings[0].text, "1: NVIDIA H200; driver 580.95.05");
}

TEST_F(DoctorTest, Mpi) {
  EXPECT_THAT(check_mpi(machine), ElementsAre(finding(Verdict::ok, "no mpirun")));
  fs::create_directories(machine.root / "bin");
  test::write_file((machine.root / "bin/mpiexec").string(), "", 0700);
  variables["PATH"] = "/nowhere:" + (machine.root / "bin").string();
  EXPECT_THAT(check_mpi(machine), ElementsAre(finding(Verdict::ok, "/bin/mpiexec")));
}

TEST(Doctor, SharedMemoryOfThisMachineWorks) {
  EXPECT_THAT(check_processes(), ElementsAre(finding(Verdict::ok, "open each other's")));
}

TEST(Doctor, TheCommand) {
  const std::string threads = std::to_string(std::thread::hardware_concurrency() + 1);
  const test::Result result = test::lockstep_command({"doctor"}, {"MKL_NUM_THREADS=" + threads});
  for (const char* part :
       {"Lockstep", "cores", "memory", "open files", "shared memory", "libtorch"})
    EXPECT_THAT(result.out, HasSubstr(part));
  EXPECT_THAT(result.out,
              HasSubstr("warning  threads         MKL_NUM_THREADS=" + threads + " is more than"));
  // Nothing but a problem is a failure, and a build without libtorch has one.
  const bool problem = result.out.find("PROBLEM") != std::string::npos;
  EXPECT_EQ(result.code, problem ? 1 : 0) << result.out << result.err;
  EXPECT_EQ(problem, !fs::exists(LOCKSTEP_TEST_BIN "/lockstep-torch")) << result.out;
  if (!problem) {
    EXPECT_THAT(result.out, ContainsRegex("\nok       bfloat16        usable, [0-9.]+ GFLOP/s|"
                                          "\nnote     bfloat16        slow, [0-9.]+ GFLOP/s.*: .* "
                                          "[0-9.e+]+ times the time of float32; train with float32|"
                                          "\nnote     bfloat16        not usable on this CPU"));
  }
  EXPECT_THAT(result.err, IsEmpty());
  EXPECT_EQ(test::lockstep_command({"doctor", "--nonsense"}).code, 2);
}

}  // namespace
}  // namespace lockstep::cli
