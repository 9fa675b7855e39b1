// SPDX-License-Identifier: Apache-2.0
// Jobs over two nodes, which here are two launchers on one machine.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <memory>
#include <thread>

#include "lockstep/launch/rendezvous/rendezvous.h"
#include "lockstep/launch/rendezvous/secret.h"
#include "lockstep/launch/rendezvous/socket.h"
#include "tests/support/says.h"
#include "tests/support/subprocess.h"

namespace lockstep::test {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

class Nodes : public ::testing::Test {
 protected:
  Nodes() {
    address_ = "127.0.0.1:" + std::to_string(launch::port_of(port_holder_));
    write_file(token_file_, "two-nodes-one-secret");
  }

  std::unique_ptr<Subprocess> node(int node_rank, const std::string& script, int ranks = 2,
                                   const std::vector<std::string>& options = {}, int nodes = 2) {
    return node_of(std::to_string(nodes), node_rank, script, ranks, options);
  }
  // `nodes` as --nnodes takes it.
  std::unique_ptr<Subprocess> node_of(const std::string& nodes, int node_rank,
                                      const std::string& script, int ranks,
                                      std::vector<std::string> options) {
    options.insert(options.end(), {"--nnodes", nodes, "--node-rank", std::to_string(node_rank),
                                   "--rendezvous", address_, "--token-file", token_file_});
    return std::make_unique<Subprocess>(run_script(ranks, script, options));
  }
  static bool printed(const Subprocess& job, const std::string& text) {
    return eventually([&] { return job.out().find(text) != std::string::npos; });
  }

  TempDir dir_;
  const Fd port_holder_ = launch::bind_socket({"127.0.0.1", 0});  // the launcher may listen on it
  std::string address_, token_file_ = dir_.path() + "/token";
  std::atomic<bool> talks_ = false;
};

TEST_F(Nodes, AreOneJob) {
  const std::string script =
      "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $GROUP_RANK/$GROUP_WORLD_SIZE "
      "$MASTER_ADDR:$MASTER_PORT $TORCHELASTIC_RUN_ID $LOCKSTEP_RENDEZVOUS";
  auto second = node(1, script);  // may come first
  auto first = node(0, script);
  const Result a = first->wait(), b = second->wait();
  EXPECT_EQ(a.code, 0) << a.err;
  EXPECT_EQ(b.code, 0) << b.err;
  EXPECT_THAT(a.out, AllOf(HasSubstr("[rank0]: 0/4 0/2 0/2 127.0.0.1:"),
                           HasSubstr("[rank1]: 1/4 1/2 0/2 127.0.0.1:")));
  EXPECT_THAT(b.out, AllOf(HasSubstr("[rank2]: 2/4 0/2 1/2 127.0.0.1:"),
                           HasSubstr("[rank3]: 3/4 1/2 1/2 127.0.0.1:")));
  // The rendezvous addresses are the same on both.
  const auto tail = [](const std::string& out) {
    const size_t at = out.find("127.0.0.1:");
    return out.substr(at, out.find('\n', at) - at);
  };
  EXPECT_EQ(tail(a.out), tail(b.out));
  EXPECT_THAT(a.out, HasSubstr(" " + address_ + "\n"));
}

TEST_F(Nodes, RanksOfBothMeet) {
  const std::string self =
      "exec " + this_program() +
      " --gtest_also_run_disabled_tests --gtest_filter=RankProgram.DISABLED_MeetsItsPeers";
  auto first = node(0, self), second = node(1, self);
  const Result a = first->wait(), b = second->wait();
  EXPECT_EQ(a.code, 0) << a.out << a.err;
  EXPECT_EQ(b.code, 0) << b.out << b.err;
}

TEST_F(Nodes, AFailureOnOneEndsBothAndBothNameIt) {
  for (const std::string failing : {"0", "3"}) {
    const std::string script = "test $RANK != " + failing + " || exit 6; sleep 1000";
    auto first = node(0, script), second = node(1, script);
    const Result a = first->wait(), b = second->wait();
    for (const Result& result : {a, b}) {
      EXPECT_EQ(result.code, 6);
      EXPECT_THAT(result.last_line(),
                  AllOf(HasSubstr("rank " + failing + " on node"), HasSubstr("code 6")));
      // Where it is, whichever node prints the line.
      EXPECT_THAT(result.last_line(),
                  says(failing == "0" ? "output is on node 0" : "output is on node 1"));
    }
    EXPECT_TRUE(eventually([&] { return first->others().empty() && second->others().empty(); }));
  }
}

TEST_F(Nodes, RestartTogether) {
  const std::string script =
      "echo run $LOCKSTEP_GENERATION; test $RANK != 2 -o $LOCKSTEP_GENERATION != 0 || exit 6; "
      "test $LOCKSTEP_GENERATION = 1 || sleep 1000";
  auto first = node(0, script, 2, {"--max-restarts", "2"}), second = node(1, script);
  const Result a = first->wait(), b = second->wait();
  for (const Result& result : {a, b}) {
    EXPECT_EQ(result.code, 0) << result.err;
    EXPECT_THAT(result.out, AllOf(HasSubstr("run 0"), HasSubstr("run 1")));
    EXPECT_THAT(result.err, HasSubstr("restart 1 of 2"));
  }
}

TEST_F(Nodes, AStopOnOneStopsBoth) {
  const std::string script =
      "trap 'echo saved; exit 75' TERM; echo ready; while :; do sleep 0.01; done";
  auto first = node(0, script), second = node(1, script);
  const auto ready = [](const Subprocess& job) {
    return eventually([&] {
      const std::string out = job.out();
      return out.find("ready") != out.rfind("ready");
    });
  };
  ASSERT_TRUE(ready(*first) && ready(*second));
  second->kill(SIGTERM);
  const Result a = first->wait(), b = second->wait();
  EXPECT_EQ(a.code, 75) << a.err;
  EXPECT_EQ(b.code, 75) << b.err;
  EXPECT_THAT(a.out, HasSubstr("saved"));
}

TEST_F(Nodes, ALostNodeEndsTheOther) {
  for (const int lost : {0, 1}) {
    auto first = node(0, "echo ready; sleep 1000"), second = node(1, "echo ready; sleep 1000");
    const auto ready = [](const Subprocess& job) {
      return eventually([&] { return job.out().find("ready") != std::string::npos; });
    };
    ASSERT_TRUE(ready(*first) && ready(*second));
    (lost == 0 ? first : second)->kill(SIGKILL);
    const Result result = (lost == 0 ? second : first)->wait();
    EXPECT_EQ(result.code, 1);
    EXPECT_THAT(result.last_line(), HasSubstr("node " + std::to_string(lost) + " was lost"));
    EXPECT_TRUE(eventually([&] { return first->others().empty() && second->others().empty(); }));
  }
}

// Ranks that say who they are, and run until the launcher asks them to stop, except where there is
// a file.
std::string until(const std::string& file) {
  return "echo run $LOCKSTEP_GENERATION: $RANK of $WORLD_SIZE, node $GROUP_RANK of "
         "$GROUP_WORLD_SIZE, $LOCKSTEP_WORLD_CHANGE; trap 'exit 75' TERM; until test -e " +
         file + "; do sleep 0.01; done";
}

TEST_F(Nodes, TheJobContinuesWithoutALostNodeAndWithItAgain) {
  const std::string done = dir_.path() + "/done";
  const std::vector<std::string> options{"--max-restarts", "3", "--grow-after", "1"};
  const auto start = [&](int node_rank) {
    return node_of("2:3", node_rank, until(done), 1, options);
  };
  auto first = start(0), second = start(1), third = start(2);
  ASSERT_TRUE(printed(*first, "run 0: 0 of 3") && printed(*second, "run 0: 1 of 3") &&
              printed(*third, "run 0: 2 of 3"));
  second->kill(SIGKILL);
  ASSERT_TRUE(printed(*first, "run 1: 0 of 2, node 0 of 2, -1 3 node 1"));
  ASSERT_TRUE(printed(*third, "run 1: 1 of 2, node 1 of 2"));  // ranks are numbered again
  EXPECT_THAT(first->err(), says("2 of 3 ranks ... node 1 (restart 1 of 3)"));
  auto again = start(1);
  ASSERT_TRUE(printed(*again, "run 2: 1 of 3, node 1 of 3"));
  ASSERT_TRUE(printed(*first, "run 2: 0 of 3, node 0 of 3, -1 2"));
  ASSERT_TRUE(printed(*third, "run 2: 2 of 3"));
  write_file(done, "");
  for (const auto& node : {&first, &again, &third}) {
    const Result result = (*node)->wait();
    EXPECT_EQ(result.code, 0) << result.err;
  }
}

TEST_F(Nodes, ALostNodeThatComesBackInTimeTakesItsPlace) {
  const std::string done = dir_.path() + "/done";
  const std::vector<std::string> options{"--max-restarts", "3"};
  auto first = node(0, until(done), 1, options), second = node(1, until(done), 1, options);
  ASSERT_TRUE(printed(*first, "run 0") && printed(*second, "run 0"));
  second->kill(SIGKILL);
  ASSERT_TRUE(
      eventually([&] { return first->err().find("node 1 was lost") != std::string::npos; }));
  auto again = node(1, until(done), 1, options);
  ASSERT_TRUE(printed(*first, "run 1: 0 of 2") && printed(*again, "run 1: 1 of 2"));
  write_file(done, "");
  EXPECT_EQ(first->wait().code, 0);
  EXPECT_EQ(again->wait().code, 0);
}

TEST_F(Nodes, WithoutEnoughNodesTheJobEndsAfterTheTimeout) {
  const std::vector<std::string> options{"--max-restarts", "3", "--rendezvous-timeout", "2"};
  const std::string never = until(dir_.path() + "/never");
  auto first = node_of("2:3", 0, never, 1, options), second = node_of("2:3", 2, never, 1, options);
  ASSERT_TRUE(printed(*first, "run 0: 0 of 2") && printed(*second, "run 0: 1 of 2"));
  second->kill(SIGKILL);
  const Result result = first->wait();
  EXPECT_EQ(result.code, 1);
  EXPECT_THAT(result.last_line(), says("waited 2 s ... nodes 1, 2"));
}

TEST_F(Nodes, TheLossOfNode0EndsAnElasticJob) {
  const std::vector<std::string> options{"--max-restarts", "3"};
  const std::string never = until(dir_.path() + "/never");
  auto first = node_of("1:2", 0, never, 1, options), second = node_of("1:2", 1, never, 1, options);
  ASSERT_TRUE(printed(*first, "run 0") && printed(*second, "run 0"));
  first->kill(SIGKILL);
  const Result result = second->wait();
  EXPECT_EQ(result.code, 1);
  EXPECT_THAT(result.last_line(), HasSubstr("node 0 was lost"));
  EXPECT_TRUE(eventually([&] { return second->others().empty(); }));
}

// It came late and waits; the end of the job is its end, and it must start what the others do.
TEST_F(Nodes, ALateNodeJoinsARunningJobOrIsRefused) {
  const std::string done = dir_.path() + "/done";
  const std::vector<std::string> options{"--max-restarts", "1", "--rendezvous-timeout", "1"};
  auto first = node_of("1:2", 0, until(done), 2, options);
  ASSERT_TRUE(printed(*first, "run 0: 0 of 2"));
  const Result other = node_of("1:2", 1, "true", 1, options)->wait();
  EXPECT_EQ(other.code, 2);
  EXPECT_THAT(other.last_line(), says("node 1 starts 1 ranks ... 2 ranks"));
  auto late = node_of("1:2", 1, until(done), 2, options);
  ASSERT_TRUE(printed(*late, "run 1: 2 of 4") && printed(*first, "run 1: 0 of 4"));
  write_file(done, "");
  EXPECT_EQ(first->wait().code, 0);
  EXPECT_EQ(late->wait().code, 0);
}

TEST_F(Nodes, ThatDisagreeAreRefused) {
  auto first = node(0, "true", 2), second = node(1, "true", 3);
  const Result a = first->wait(), b = second->wait();
  for (const Result& result : {a, b}) {
    EXPECT_EQ(result.code, 2);
    EXPECT_THAT(result.last_line(), AllOf(HasSubstr("starts 2"), HasSubstr("starts 3"),
                                          HasSubstr("-n differs"), Not(HasSubstr("version"))));
  }
}

TEST_F(Nodes, ANumberThatIsTakenIsRefused) {
  auto first = node(0, "true", 1, {}, 3);
  auto second = node(1, "true", 1, {}, 3);
  auto twin = node(1, "true", 1, {}, 3);
  // One of the two is refused, and all are told.
  for (const auto& node : {&first, &second, &twin}) {
    const Result result = (*node)->wait();
    EXPECT_EQ(result.code, 2);
    EXPECT_THAT(result.last_line(), HasSubstr("node 1 is already connected"));
  }
}

TEST_F(Nodes, WhoDoesNotComeInTimeIsNamedEverywhere) {
  auto first = node(0, "true", 1, {"--rendezvous-timeout", "3"}, 4);
  auto second = node(2, "true", 1, {"--rendezvous-timeout", "3"}, 4);
  for (const auto& node : {&first, &second}) {
    const Result result = (*node)->wait();
    EXPECT_EQ(result.code, 1);
    EXPECT_THAT(result.last_line(), HasSubstr("waited 3 s for nodes 1, 3"));
  }
}

TEST_F(Nodes, OfAnotherVersionAreRefused) {
  auto first = node(0, "true", 2);
  launch::RendezvousClient other(address_, launch::token_for_job("two-nodes-one-secret", ""),
                                 {1, 2, launch::kControlGeneration}, Deadline(kDefaultTimeout));
  other.set("node/1", "life 2 ranks of Lockstep 9.9.9");
  EXPECT_THAT(other.get(launch::kJoinedKey, Deadline(kDefaultTimeout)),
              AllOf(HasSubstr("refused "), HasSubstr("node 1 starts 2 ranks of Lockstep 9.9.9")));
  other.set("left/1", "yes");
  const Result result = first->wait();
  EXPECT_EQ(result.code, 2);
  EXPECT_THAT(result.last_line(), AllOf(HasSubstr("node 1 starts 2 ranks of Lockstep 9.9.9"),
                                        HasSubstr("version differs"), Not(HasSubstr("-n "))));
}

TEST_F(Nodes, AnotherServiceAtTheAddressIsFoundOut) {
  launch::start_listening(port_holder_, {});
  const std::jthread service([&](const std::stop_token& stop) {
    std::vector<Fd> silent;
    while (!stop.stop_requested()) {
      pollfd waiting{port_holder_.get(), POLLIN, 0};
      if (poll(&waiting, 1, 10) <= 0) continue;
      Fd client(accept4(port_holder_.get(), nullptr, nullptr, SOCK_CLOEXEC));
      if (talks_) [[maybe_unused]]
        const ssize_t sent = write(client.get(), "SSH-2.0-x\r\n", 11);
      silent.push_back(std::move(client));
    }
  });
  const Result silent = node(1, "true", 1, {"--rendezvous-timeout", "1"})->wait();
  EXPECT_EQ(silent.code, 1);
  EXPECT_THAT(silent.last_line(), says("node 1 ... " + address_ + " ... check the port"));
  talks_ = true;
  const Result talking = node(1, "true", 1)->wait();
  EXPECT_EQ(talking.code, 1);
  EXPECT_THAT(talking.last_line(), says("node 1 ... " + address_ + " ... check the port"));
  EXPECT_LT(talking.seconds, 30.0);  // not only at the deadline
}

TEST_F(Nodes, TheWholeTimeThatANodeHasWaitedIsNamed) {
  const Result result = node(1, "true", 1, {"--rendezvous-timeout", "2"})->wait();
  EXPECT_EQ(result.code, 1);
  EXPECT_THAT(result.last_line(),
              AllOf(says("node 1 ... " + address_ + " ... firewall ... --rendezvous-timeout"),
                    ContainsRegex("after [2-9]\\.[0-9] s")));
}

TEST_F(Nodes, LogsOfAnEarlierJobStayOnEveryNode) {
  const std::vector<std::string> logs{"--log-dir", dir_.path()};
  EXPECT_EQ(Subprocess(run_script(1, "echo old", logs)).wait().code, 0);  // rank 0 only
  auto first = node(0, "echo new", 1, logs), second = node(1, "echo new", 1, logs);
  EXPECT_EQ(first->wait().code, 0);
  EXPECT_EQ(second->wait().code, 0);
  EXPECT_EQ(read_file(dir_.path() + "/attempt_0/rank0/stdout.log"), "old\n");
  for (const std::string rank : {"0", "1"})
    EXPECT_EQ(read_file(dir_.path() + "/attempt_1/rank" + rank + "/stdout.log"), "new\n");
}

TEST_F(Nodes, AWrongSecretIsRefused) {
  auto first = node(0, "true");
  write_file(dir_.path() + "/other", "another");
  token_file_ = dir_.path() + "/other";
  const Result refused = node(1, "true")->wait();
  EXPECT_EQ(refused.code, 2);
  EXPECT_THAT(refused.last_line(), HasSubstr("wrong token"));
  first->kill(SIGTERM);
  EXPECT_EQ(first->wait().code, 128 + SIGTERM);
}

}  // namespace
}  // namespace lockstep::test
