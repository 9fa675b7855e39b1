// SPDX-License-Identifier: Apache-2.0
// Ranks that start communication again and again under one launcher, in one process or in several
// programs, and while strangers connect to their ports.
#include <dirent.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <set>
#include <sstream>
#include <thread>

#include "lockstep/core/error.h"
#include "lockstep/launch/rendezvous/rendezvous.h"
#include "lockstep/launch/rendezvous/socket.h"
#include "tests/support/sampling.h"
#include "tests/support/subprocess.h"

namespace lockstep::test {
namespace {

using ::testing::HasSubstr;

const std::string kRankProgram = std::string(LOCKSTEP_TEST_BIN) + "/init_rank";

// Rank 0 listens again at the port of its last incarnation, which a faster rank may still find.
std::vector<std::string> at_an_address(const std::string& ranks) {
  const launch::RendezvousServer probe("probe");
  const std::string port = probe.address().substr(probe.address().rfind(':') + 1);
  return {LOCKSTEP_COMMAND,
          "run",
          "-n",
          ranks,
          "env",
          "-u",
          "LOCKSTEP_RENDEZVOUS",
          "-u",
          "LOCKSTEP_TOKEN_FD",
          "MASTER_ADDR=127.0.0.1",
          "MASTER_PORT=" + port};
}

#ifdef LOCKSTEP_TORCHRUN_PYTHON
// Debian's torch 1.13 cannot read its own default of --redirects and --tee under Python 3.11.
std::vector<std::string> torchrun(const std::string& ranks) {
  return {LOCKSTEP_TORCHRUN_PYTHON,
          "-m",
          "torch.distributed.run",
          "--standalone",
          "--nproc_per_node",
          ranks,
          "--redirects",
          "1",
          "--tee",
          "1",
          "--no_python"};
}
#endif

int cycles() { return tests_all() ? 1000 : 8; }
milliseconds limit() { return milliseconds{tests_all() ? 1'200'000 : 60'000}; }

// Three ranks, which use one backend after another; "auto" is shm on one host.
void expect_cycles(std::vector<std::string> argv, const std::vector<std::string>& backends) {
  const std::string count = std::to_string(cycles());
  std::string list;
  for (const std::string& backend : backends) list += "," + backend;
  argv.insert(argv.end(), {kRankProgram, "--cycles", count, list.substr(1)});
  const Result result = Subprocess(argv).wait(limit());
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr(count + " cycles are right"));
  for (const std::string& backend : backends) {
    const std::string used = backend == "auto" ? "shm" : backend;
    for (const std::string rank : {"0", "1", "2"})
      EXPECT_THAT(result.out, HasSubstr("rank " + rank + " of 3, local " + rank +
                                        " of 3, backend " + used + ", sum 6"));
  }
}

TEST(InitAgain, UnderOurLauncher) {
  expect_cycles({LOCKSTEP_COMMAND, "run", "-n", "3"}, {"auto", "gloo"});
  if (tests_all()) expect_cycles({LOCKSTEP_COMMAND, "run", "-n", "3"}, {"gloo", "shm"});
}

TEST(InitAgain, AtAnAddress) { expect_cycles(at_an_address("3"), {"shm", "gloo"}); }

#ifdef LOCKSTEP_MPIRUN
TEST(InitAgain, UnderMpirun) {
  const std::vector<std::string> mpirun{LOCKSTEP_MPIRUN, "--allow-run-as-root", "--oversubscribe",
                                        "-n", "3"};
  expect_cycles(mpirun, {"mpi", "gloo", "auto"});
  if (tests_all()) expect_cycles(mpirun, {"gloo", "shm"});
}
#endif

#ifdef LOCKSTEP_TORCHRUN_PYTHON
TEST(InitAgain, UnderTorchrun) { expect_cycles(torchrun("3"), {"shm", "gloo"}); }
#endif

// Two programs one after the other in the script of a rank.
void expect_second_is_right(std::vector<std::string> argv, const std::string& first,
                            const std::string& backend) {
  argv.insert(argv.end(), {"sh", "-c", first + "; exec " + kRankProgram + " " + backend});
  const Result result = Subprocess(argv).wait(milliseconds{60'000});
  EXPECT_EQ(result.code, 0) << result.err;
  for (const std::string rank : {"0", "1"})
    EXPECT_THAT(result.out, HasSubstr("rank " + rank + " of 2, local " + rank + " of 2, backend " +
                                      backend + ", sum 3"))
        << result.err;
}

TEST(InitAgain, ByTheNextProgramOfARank) {
  const std::vector<std::string> ours{LOCKSTEP_COMMAND, "run", "-n", "2"};
  if (tests_all()) expect_second_is_right(ours, kRankProgram + " shm >/dev/null", "shm");
  // The first ends badly, on one rank without a word.
  expect_second_is_right(ours, kRankProgram + " --vanish gloo 2>/dev/null", "gloo");
  expect_second_is_right(at_an_address("2"), kRankProgram + " gloo >/dev/null", "gloo");
#ifdef LOCKSTEP_TORCHRUN_PYTHON
  if (tests_all()) expect_second_is_right(torchrun("2"), kRankProgram + " shm >/dev/null", "shm");
#endif
}

// It hosts the rendezvous, without which the others would take it for lost.
void expect_others_outlive_rank0(std::vector<std::string> argv, const std::string& backend) {
  argv.insert(argv.end(), {kRankProgram, "--outlive", backend});
  const Result result = Subprocess(argv).wait(milliseconds{60'000});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("received 6"));
}

TEST(InitAgain, OtherRanksOutliveRank0) {
  expect_others_outlive_rank0(at_an_address("3"), "gloo");
#ifdef LOCKSTEP_MPIRUN
  expect_others_outlive_rank0(
      {LOCKSTEP_MPIRUN, "--allow-run-as-root", "--oversubscribe", "-n", "3"}, "mpi");
#endif
}

// Connects to every port at which some processes listen, again and again.
class Scanner {
 public:
  explicit Scanner(const Subprocess& processes)
      : thread_([this, &processes](const std::stop_token& stop) {
          // To find the processes takes much longer than to look at them, and a port is open for
          // milliseconds.
          std::vector<pid_t> found;
          for (int looks = 0; !stop.stop_requested(); ++looks) {
            if (looks % 50 == 0) found = processes.others();
            for (const uint16_t port : ports_of(found)) visit(port);
          }
        }) {}
  // How many connections it has made so far.
  int visits() const { return visits_; }

 private:
  // As the kernel lists them: sockets in the state "listen" whose inodes the processes have open.
  static std::set<uint16_t> ports_of(const std::vector<pid_t>& processes) {
    std::set<std::string> inodes;
    for (const pid_t process : processes) {
      const std::string folder = "/proc/" + std::to_string(process) + "/fd/";
      DIR* const listing = opendir(folder.c_str());
      if (listing == nullptr) continue;
      while (const dirent* entry = readdir(listing)) {
        char target[64];
        const ssize_t size = readlink((folder + entry->d_name).c_str(), target, sizeof target);
        const std::string text(target, static_cast<size_t>(std::max<ssize_t>(size, 0)));
        if (text.starts_with("socket:[")) inodes.insert(text.substr(8, text.size() - 9));
      }
      closedir(listing);
    }
    std::set<uint16_t> ports;
    std::ifstream table("/proc/net/tcp");
    for (std::string line; std::getline(table, line);) {
      std::istringstream words(line);
      std::string number, local, remote, state, skip, inode;
      words >> number >> local >> remote >> state >> skip >> skip >> skip >> skip >> skip >> inode;
      if (state == "0A" && local.starts_with("0100007F:") && inodes.contains(inode))
        ports.insert(static_cast<uint16_t>(std::stoi(local.substr(9), nullptr, 16)));
    }
    return ports;
  }

  // Some say nothing and leave, some say nonsense, some stay.
  void visit(uint16_t port) {
    try {
      Fd fd = launch::connect_socket({{"127.0.0.1", port}}, Deadline(milliseconds{20}));
      if (++visits_ % 3 == 1) {
        const std::string nonsense(100, static_cast<char>(visits_));
        write_full(fd, std::as_bytes(std::span(nonsense)), Deadline(milliseconds{100}));
      }
      if (visits_ % 3 == 2) staying_.push_back(std::move(fd));
      if (staying_.size() > 200) staying_.clear();
    } catch (const Error&) {  // closed in the meantime
    }
  }

  std::atomic<int> visits_{0};
  std::vector<Fd> staying_;
  std::jthread thread_;
};

TEST(InitAgain, GlooWhileStrangersConnectToItsPorts) {
  const std::string count = tests_all() ? "100" : "10";
  // On a loaded machine the scanner may find no open port in a whole run.
  int visits = 0;
  for (int i = 0; i < 20 && visits == 0; ++i) {
    Subprocess ranks({LOCKSTEP_COMMAND, "run", "-n", "3", kRankProgram, "--cycles", count, "gloo"});
    const Scanner scanner(ranks);
    const Result result = ranks.wait(limit());
    ASSERT_EQ(result.code, 0) << result.err;
    EXPECT_THAT(result.out, HasSubstr(count + " cycles are right"));
    visits = scanner.visits();
  }
  EXPECT_GT(visits, 0);
}

}  // namespace
}  // namespace lockstep::test
