// SPDX-License-Identifier: Apache-2.0
// Copies of a run's state in memory: what is found of them after a rank has died, and what is
// refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <filesystem>

#include "lockstep/core/error.h"
#include "lockstep/launch/recovery_memory.h"
#include "lockstep/train/recovery/copy_region.h"
#include "lockstep/train/stop_request.h"
#include "tests/train/train_command.h"

namespace lockstep::test {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::UnorderedElementsAre;
using train::CopyId;
using train::CopyRegion;

class Copies : public testing::Test {
 protected:
  static constexpr uint64_t kBytes = 100'032;  // a multiple of the alignment

  // As a rank has it in the generation of this number.
  std::unique_ptr<CopyRegion> region(int64_t generation = 0, int local_rank = 1,
                                     int area = 0) const {
    return std::make_unique<CopyRegion>(memory_.get(), local_rank, area, generation);
  }
  std::unique_ptr<CopyRegion> claimed(int64_t generation = 0, int copies = 2) const {
    auto rank = region(generation);
    rank->claim(identity_, slices_, kBytes, copies, copies);
    return rank;
  }
  // The steps of those that are found.
  std::vector<int64_t> steps(const CopyRegion::Found& found) const {
    std::vector<int64_t> steps;
    for (const CopyId& copy : found.copies) steps.push_back(copy.step);
    return steps;
  }
  std::vector<int64_t> found(int64_t generation = 1) const {
    return steps(region(generation)->find(identity_));
  }
  static std::vector<std::byte> values(int64_t step) {
    return std::vector<std::byte>(kBytes, static_cast<std::byte>(step));
  }
  static void write(CopyRegion& to, int64_t step) {
    to.begin();
    to.append(values(step));
    to.commit(step, "state " + std::to_string(step));
  }
  uint64_t held() const {
    struct stat status {};
    EXPECT_EQ(fstat(memory_.get(), &status), 0);
    return static_cast<uint64_t>(status.st_blocks) * 512;
  }

  const std::string identity_ = "model 1", slices_ = "all of it";
  const Fd memory_ = launch::make_recovery_memory(3);
};

TEST_F(Copies, TheTwoNewestOutliveTheirRank) {
  EXPECT_THAT(found(0), IsEmpty());
  {
    const auto rank = claimed();
    for (int64_t step = 0; step < 6; ++step) write(*rank, step);
  }
  const auto next = region(1);
  EXPECT_THAT(steps(next->find(identity_)), UnorderedElementsAre(4, 5));
  EXPECT_EQ(next->find(identity_).slices, slices_);
  EXPECT_EQ(next->state({0, 4}), "state 4");
  EXPECT_EQ(std::memcmp(next->data({0, 5}).data(), values(5).data(), kBytes), 0);
  next->keep({0, 4});
  EXPECT_THAT(found(), ElementsAre(4));
  EXPECT_THROW(next->data({0, 5}), Error);
  EXPECT_THROW(next->data({1, 4}), Error);
  EXPECT_THAT(region(1, 2)->find(identity_).copies, IsEmpty());  // another rank's are its own
  EXPECT_THAT(region(1, 1, 1)->find(identity_).copies, IsEmpty());
}

// As a GPU does.
TEST_F(Copies, MayBeFilledByTheCaller) {
  const auto rank = claimed();
  for (const int64_t step : {1, 2, 3}) {
    rank->begin();
    const auto all = values(step);
    rank->append(std::span(all).first(100));
    const auto room = rank->room(kBytes - 100);
    std::ranges::fill(room, static_cast<std::byte>(step));
    rank->commit(step, "");
    EXPECT_EQ(std::memcmp(rank->data({0, step}).data(), all.data(), kBytes), 0);
    if (step == 3) room[kBytes / 2] = std::byte{};
  }
  EXPECT_THAT(found(), ElementsAre(2));
}

// At any place in the copying: the copy before is whole.
TEST_F(Copies, ACopyThatWasCutOffIsNotFound) {
  const auto rank = claimed();
  write(*rank, 1);
  write(*rank, 2);
  for (const uint64_t written : {uint64_t{0}, uint64_t{1}, kBytes}) {
    rank->begin();
    const auto third = values(3);
    rank->append(std::span(third).first(written));
    EXPECT_THAT(found(0), ElementsAre(2)) << written;
  }
  rank->commit(3, "");
  EXPECT_THAT(found(0), UnorderedElementsAre(2, 3));
}

TEST_F(Copies, DamagedOnesAndThoseOfAnotherRunAreRefused) {
  const auto rank = claimed();
  write(*rank, 7);
  write(*rank, 8);
  EXPECT_THAT(region(1)->find("model 2").refused, HasSubstr("another configuration"));
  EXPECT_THAT(region(1)->find("model 2").copies, IsEmpty());
  const auto again = region(1);
  std::byte& last = const_cast<std::byte&>(again->data({0, 8}).back());
  last ^= std::byte{1};
  EXPECT_THAT(steps(again->find(identity_)), ElementsAre(7));
  EXPECT_THAT(again->find(identity_).refused, AllOf(HasSubstr("step 8"), HasSubstr("checksum")));
  last ^= std::byte{1};
  EXPECT_THAT(found(), UnorderedElementsAre(7, 8));
}

TEST_F(Copies, ARankOfAnEarlierGenerationWritesNothing) {
  const auto old = claimed();
  write(*old, 1);
  old->begin();
  old->append(values(2));
  EXPECT_THAT(found(1), ElementsAre(1));  // who looks fences
  old->commit(2, "");
  EXPECT_THAT(found(1), ElementsAre(1));
  EXPECT_THROW(old->begin(), Error);
}

// It stays until a newer one is verified, also when the rank is started again.
TEST_F(Copies, OfThreeOneIsTheNewestThatWasVerified) {
  {
    const auto rank = claimed(0, 3);
    rank->verify_newest();  // there is none yet
    for (int64_t step = 1; step < 7; ++step) {
      write(*rank, step);
      if (step == 2) rank->verify_newest();
    }
  }
  EXPECT_THAT(found(), UnorderedElementsAre(2, 5, 6));
  const auto rank = claimed(1, 3);
  EXPECT_EQ(rank->find(identity_).room, 3);
  rank->keep({0, 5});
  EXPECT_THAT(found(), UnorderedElementsAre(2, 5));
  write(*rank, 6);
  EXPECT_THAT(found(2), UnorderedElementsAre(2, 5, 6));
  const auto next = claimed(2, 3);
  next->verify_newest();
  write(*next, 7);  // no other is as old as that of step 2
  EXPECT_THAT(found(3), UnorderedElementsAre(5, 6, 7));
  region(3)->keep_verified();
  EXPECT_THAT(found(3), ElementsAre(6));
  region(3)->drop_all();
  EXPECT_THAT(found(3), IsEmpty());
}

// The copy of the start before goes first, also where it is of the same step.
TEST_F(Copies, OfOneStepTheOlderStartIsReplaced) {
  for (const int64_t first : {1, 2}) {  // in either slot
    for (int64_t step = 0; step < first; ++step) write(*claimed(), step);
    const auto rank = claimed(1);
    const CopyId source{0, first - 1};
    rank->keep(source);
    write(*rank, source.step);
    rank->begin();
    const std::vector<CopyId> left = region(1)->find(identity_).copies;
    EXPECT_TRUE(left == std::vector<CopyId>{(CopyId{1, source.step})});
    rank->clear();
  }
}

TEST_F(Copies, TakeTheirMemoryBeforeTheyAreWrittenAndGiveItBack) {
  const auto all = CopyRegion::bytes_for(kBytes, identity_.size() + slices_.size(), 3);
  const auto rank = region();
  rank->claim(identity_, slices_, kBytes, 3, 1);
  EXPECT_GE(held(), all - 2 * (kBytes + (uint64_t{1} << 17)));
  EXPECT_LT(held(), all - 3 * kBytes / 2);
  rank->claim_rest();
  EXPECT_GE(held(), all);
  write(*rank, 1);
  rank->clear();
  EXPECT_LE(held(), uint64_t{3} * 4096);
  EXPECT_THAT(found(), IsEmpty());
}

TEST_F(Copies, TooLittleMemoryIsSaidWithBothNumbers) {
  EXPECT_NO_THROW(train::require_room_for_copies(1000, 0, 1000));
  EXPECT_NO_THROW(train::require_room_for_copies(1000, 900, 100));
  try {
    train::require_room_for_copies(5'000'000, 1'000, 2'000'000);
    FAIL();
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(),
                AllOf(HasSubstr("5000000"), HasSubstr("2001000"), Not(HasSubstr("\n"))));
  }
}

class Recovery : public Train {
 protected:
  Result run_with(const std::string& fault, const Words& options) const {
    return lockstep_command(command(options), {"LOCKSTEP_FAULT=" + fault});
  }
  // What the last checkpoint of a run has, byte for byte.
  std::vector<std::string> weights(const std::string& folder) const {
    std::vector<std::string> paths;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(path(folder))) {
      if (entry.path().extension() == ".safetensors") paths.push_back(entry.path().string());
    }
    std::sort(paths.begin(), paths.end());
    std::vector<std::string> files;
    for (const std::string& each : paths) files.push_back(read_file(each));
    EXPECT_FALSE(files.empty());
    return files;
  }
  static Words ranks(int count) {
    return {"-n", std::to_string(count), "--train.steps", "9", "--train.threads", "1"};
  }
  const Words memory_{"--recovery", "memory", "--run.max_restarts", "3"};
};

struct Layout {
  const char* name;
  int ranks;
  Words options;
};

// Without a checkpoint before the last. Two ranks die, at about the same time.
TEST_F(Recovery, TheLostStepIsRepeatedWithTheSameBitsInEveryLayout) {
  const Words offload{"--parallel.shard", "full", "--offload.optimizer", "true",
                      "--offload.params", "true"};
  std::vector<Layout> layouts{
      {"dp", 2, {}}, {"hybrid", 4, {"--parallel.shard", "hybrid", "--parallel.shard_size", "2"}}};
  if (tests_all()) {
    layouts.insert(
        layouts.end(),
        {{"tp", 2, {"--parallel.tp", "2"}},
         {"sp", 2, {"--parallel.tp", "2", "--parallel.sequence_parallel", "true"}},
         {"pp", 2, {"--parallel.pp", "2"}},
         {"interleaved",
          2,
          {"--parallel.pp", "2", "--parallel.chunks", "2", "--model.layers", "4"}},
         {"optimizer", 2, {"--parallel.shard", "optimizer"}},
         {"grad_op", 2, {"--parallel.shard", "grad_op"}},
         {"full", 2, {"--parallel.shard", "full"}},
         {"offload", 2, offload},
         {"codec", 2, offload + Words{"--offload.codec", "quantization"}},
         {"clip_mode", 2, offload + Words{"--offload.clip_mode", "none", "--optim.clip", "0"}},
         {"dp tp", 4, {"--parallel.tp", "2"}},
         {"dp pp", 4, {"--parallel.pp", "2"}},
         {"bfloat16", 2, {"--parallel.shard", "full", "--train.dtype", "bfloat16"}}});
  }
  for (const auto& [name, count, options] : layouts) {
    SCOPED_TRACE(name);
    const std::string plain = std::string(name) + " plain", lost = std::string(name) + " lost";
    const auto expected = steps_of_processes(plain, ranks(count) + options);
    const Result result = run_with(
        "rank=1,step=5,action=kill;rank=0,step=5,action=kill",
        ranks(count) + options + memory_ +
            Words{"--checkpoint.dir", path(lost), "--metrics.file", path(lost + ".jsonl")});
    EXPECT_EQ(result.code, 0) << result.err;
    EXPECT_THAT(result.out, AnyOf(HasSubstr("memory at step 4"), HasSubstr("memory at step 3")));
    EXPECT_EQ(losses(read_steps(path(lost + ".jsonl"))), losses(expected));
    EXPECT_TRUE(weights(lost) == weights(plain));
  }
}

// At the beginning and end of operations, while it starts and in a step.
TEST_F(Recovery, ARankCanBeLostAnywhere) {
  const auto expected = steps_of_processes("plain", ranks(2));
  std::vector<std::string> places{"sign=3", "step=5,sign=4"};
  if (tests_all()) {
    places.push_back("step=5,sign=1");
    for (int sign = 5; sign < 60; sign += 2)
      places.push_back((sign % 4 == 1 ? "step=4,sign=" : "sign=") + std::to_string(sign));
  }
  for (const std::string& place : places) {
    SCOPED_TRACE(place);
    const Words in{"--checkpoint.dir", path(place), "--metrics.file", path(place + ".jsonl")};
    const Result result = run_with("rank=1," + place + ",action=kill", ranks(2) + memory_ + in);
    EXPECT_EQ(result.code, 0) << result.err;
    EXPECT_THAT(result.err, HasSubstr("SIGKILL"));
    EXPECT_EQ(losses(read_steps(path(place + ".jsonl"))), losses(expected));
    EXPECT_TRUE(weights(place) == weights("plain"));
  }
}

// A configuration that has changed is not that of the copies.
TEST_F(Recovery, CopiesOfAnotherConfigurationAreRefusedAndTheCheckpointIsUsed) {
  std::string train = LOCKSTEP_COMMAND;
  for (const std::string& word : command({"--train.steps", "8", "--checkpoint.every", "3",
                                          "--train.threads", "1", "--recovery", "memory"}))
    train += " '" + word + "'";
  const Result result =
      lockstep_command({"run", "-n", "2", "--max-restarts", "1", "sh", "-c",
                        train + " --optim.weight_decay 0.$TORCHELASTIC_RESTART_COUNT"},
                       {"LOCKSTEP_FAULT=rank=1,step=6,action=kill"});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.out + result.err,
              AllOf(HasSubstr("another configuration"), HasSubstr("step-00000003 at step 3")));
}

// A start with another layout continues from what the one before has copied; of all, one more.
TEST_F(Recovery, AnotherLayoutContinuesFromTheCopies) {
  const auto expected = steps("whole", ranks(2));
  std::string train = LOCKSTEP_COMMAND;
  for (const std::string& word :
       command({"--train.steps", "9", "--train.threads", "1", "--recovery", "memory"}))
    train += " '" + word + "'";
  const std::string second =
      tests_all() ? "export LOCKSTEP_FAULT=rank=0,step=7,action=kill,start=each; " : "";
  const std::string choose =
      "case $TORCHELASTIC_RESTART_COUNT in "
      "0) export LOCKSTEP_FAULT=rank=1,step=4,action=kill; set -- --parallel.shard full ;; "
      "1) " +
      second + "set -- --parallel.tp 2 ;; *) set -- --parallel.pp 2 ;; esac; exec ";
  const Result result = lockstep_command(
      {"run", "-n", "2", "--max-restarts", "2", "sh", "-c", choose + train + " \"$@\""});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.out, AnyOf(HasSubstr("memory at step 3"), HasSubstr("memory at step 2")));
  if (tests_all()) {
    EXPECT_THAT(result.out, AnyOf(HasSubstr("memory at step 6"), HasSubstr("memory at step 5")));
  }
  expect_close(losses(read_steps(path("metrics.jsonl"))), losses(expected), 1e-5);
}

// The vote after step 4 says that the copy of step 3 is sound. That after step 8 finds the flip,
// which is in the copies since.
TEST_F(Recovery, AFlipThatIsFoundLaterReturnsToTheLastVotedCopy) {
  const auto expected = steps_of_processes("plain", ranks(2));
  const Result result = run_with("rank=1,step=6,action=flip:embed.weight:3:30",
                                 ranks(2) + memory_ + Words{"--train.verify_every", "4"});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.err, HasSubstr("step 8: "));
  EXPECT_THAT(result.out, HasSubstr("memory at step 3"));
  EXPECT_EQ(losses(read_steps(path("metrics.jsonl"))), losses(expected));
  EXPECT_TRUE(weights("checkpoints") == weights("plain"));
}

// Before the first vote there is nothing to return to but the start.
TEST_F(Recovery, CopiesOfCorruptWeightsAreDropped) {
  const Result result = run_with("rank=1,step=2,action=flip:embed.weight:3:30",
                                 ranks(2) + memory_ + Words{"--train.verify_every", "3"});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.out + result.err,
              AllOf(HasSubstr("no copy of one step in memory"), Not(HasSubstr("memory at"))));
}

// The samples that it skips stay skipped.
TEST_F(Recovery, ARollbackIsNotTakenBack) {
  if (!tests_all()) return;
  const Words options =
      ranks(2) + Words{"--checkpoint.every", "3", "--train.on_nonfinite", "rollback"};
  const std::string fault = "rank=1,step=5,action=nan;rank=1,step=5,action=nan";
  const auto in = [&](const std::string& name) {
    return Words{"--checkpoint.dir", path(name), "--metrics.file", path(name + ".jsonl")};
  };
  EXPECT_EQ(run_with(fault, options + in("plain")).code, 0);
  const Result result =
      run_with(fault + ";rank=0,step=7,action=kill", options + memory_ + in("lost"));
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("memory at step"));
  EXPECT_TRUE(weights("lost") == weights("plain"));
}

// Whether it comes before the launcher starts the ranks again, or while they load.
TEST_F(Recovery, AStopAfterADeathSavesWhatIsInMemory) {
  const std::string folder = path("stopped"), metrics = path("stopped.jsonl");
  std::vector<std::string> argv{LOCKSTEP_COMMAND};
  for (const std::string& word :
       command(Words{"-n", "2", "--train.steps", "1000000", "--train.threads", "1"} + memory_ +
               Words{"--checkpoint.every", "1000000", "--checkpoint.dir", folder, "--metrics.file",
                     metrics}))
    argv.push_back(word);
  Subprocess process(argv, {"LOCKSTEP_FAULT=rank=1,step=5,action=kill"});
  size_t most = 0;
  ASSERT_TRUE(eventually([&] {
    const size_t now = process.others().size();
    most = std::max(most, now);
    return now < most && std::filesystem::exists(metrics) && read_steps(metrics).size() >= 4;
  })) << process.err();
  process.kill(SIGTERM);
  const Result result = process.wait();
  EXPECT_EQ(result.code, 75) << result.err;
  EXPECT_THAT(result.out, AnyOf(HasSubstr("memory at step 4"), HasSubstr("memory at step 3")));
  EXPECT_FALSE(weights("stopped").empty());
}

TEST(StopRequests, AnEndWinsOverAResize) {
  const train::StopRequest stop;
  EXPECT_EQ(stop.asked(), train::Stop::none);
  const auto send = [](int value) { sigqueue(getpid(), SIGTERM, sigval{.sival_int = value}); };
  send(launch::kStopToResize);
  EXPECT_EQ(stop.asked(), train::Stop::resize);
  send(1);
  EXPECT_EQ(stop.asked(), train::Stop::end);
  send(launch::kStopToResize);
  EXPECT_EQ(stop.asked(), train::Stop::end);
}

// Ranks that are to become more end together, with copies of the same step and no checkpoint.
TEST_F(Recovery, AStopToResizeNeedsNoCheckpoint) {
  std::string train = LOCKSTEP_COMMAND;
  for (const std::string& word : command({"--train.steps", "1000000", "--train.threads", "1",
                                          "--recovery", "memory", "--checkpoint.every", "1000000"}))
    train += " '" + word + "'";
  const std::string at = path("start.$TORCHELASTIC_RESTART_COUNT.");
  // To this launcher the code says that the rank failed; it must not end ranks that still copy.
  const std::string script = train + " & echo $! > " + at + "$RANK; wait $!; code=$?; touch " + at +
                             "ended.$RANK; until [ -e " + at + "ended.0 ] && [ -e " + at +
                             "ended.1 ]; do sleep 0.02; done; [ $code = 75 ] && exit 9; exit $code";
  Subprocess process(
      {LOCKSTEP_COMMAND, "run", "-n", "2", "--max-restarts", "1", "sh", "-c", script});
  const auto reached = [&](size_t count) {
    return eventually([&] {
      return std::filesystem::exists(path("metrics.jsonl")) &&
             read_steps(path("metrics.jsonl")).size() >= count;
    });
  };
  ASSERT_TRUE(reached(3)) << process.err();
  for (const char* rank : {"0", "1"}) {
    const pid_t pid = std::stoi(read_file(path(std::string("start.0.") + rank)));
    EXPECT_EQ(sigqueue(pid, SIGTERM, sigval{.sival_int = launch::kStopToResize}), 0);
  }
  ASSERT_TRUE(eventually([&] { return process.out().find("memory at") != std::string::npos; }))
      << process.err();
  EXPECT_FALSE(std::filesystem::exists(path("checkpoints/latest")));
  const size_t before = read_steps(path("metrics.jsonl")).size();
  ASSERT_TRUE(reached(before + 1));
  process.kill(SIGKILL);
  process.wait();
  const std::string out = process.out();
  const auto number_after = [&](const std::string& words) {
    const size_t begin = out.find(words);
    return begin == std::string::npos ? -1 : std::stoi(out.substr(begin + words.size()));
  };
  EXPECT_EQ(number_after("memory at step"), number_after("stopped at step"));
  int64_t expected = 0;  // each step once
  for (const json& step : read_steps(path("metrics.jsonl"))) EXPECT_EQ(step["step"], ++expected);
}

TEST_F(Recovery, NeedsALauncherThatStartsRanksAgain) {
  expect_refused({"-n", "2", "--recovery", "memory"}, "run.recovery ... run.max_restarts");
  expect_refused({"--recovery", "memory"}, "run.recovery ... --max-restarts");
  expect_refused({"--recovery", "tape"}, "run.recovery ... tape");
}

}  // namespace
}  // namespace lockstep::test
