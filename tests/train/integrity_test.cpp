// SPDX-License-Identifier: Apache-2.0
// Memory that changes on one rank, gradients that are not finite, losses that jump: each is found,
// the rank is named, and the run does what its configuration says.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/train/integrity/checksum.h"
#include "lockstep/train/integrity/fault_injection.h"
#include "lockstep/train/integrity/state_vote.h"
#include "tests/support/refused.h"
#include "tests/support/says.h"
#include "tests/train/train_command.h"

namespace lockstep::test {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using testing::ThrowsMessage;

// LOCKSTEP_FAULT for a while.
class Faults {
 public:
  explicit Faults(const std::string& text) { setenv("LOCKSTEP_FAULT", text.c_str(), 1); }
  ~Faults() { unsetenv("LOCKSTEP_FAULT"); }
  Faults(const Faults&) = delete;
  Faults& operator=(const Faults&) = delete;
};

int64_t number(const at::Tensor& tensor) { return train::checksums({tensor}).item<int64_t>(); }

TEST(Checksum, ChangesWithEveryBit) {
  const at::Tensor memory = at::arange(0, 4800).to(at::kByte);
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kDouble, at::kByte}) {
    const auto width = static_cast<int64_t>(c10::elementSize(dtype));
    const at::Tensor all = memory.view(dtype);
    for (const int64_t begin : {0, 1, 3}) {
      for (const int64_t count : {1, 2, 7, 555}) {
        const at::Tensor part = all.narrow(0, begin, count);
        const int64_t before = number(part);
        auto* const bytes = static_cast<uint8_t*>(part.data_ptr());
        for (int64_t bit = 0; bit < count * width * 8; bit += 1 + bit / 97) {
          bytes[bit / 8] ^= static_cast<uint8_t>(1U << (bit % 8));
          ASSERT_NE(number(part), before) << dtype << " " << begin << " " << count << " " << bit;
          bytes[bit / 8] ^= static_cast<uint8_t>(1U << (bit % 8));
        }
        EXPECT_EQ(number(part), before);
      }
    }
  }
}

TEST(Checksum, DependsOnPlacesButNotOnStrides) {
  const at::Tensor rows = at::rand({64, 1024});
  EXPECT_EQ(number(rows), number(rows.clone()));
  EXPECT_NE(number(rows), number(rows.flip(0)));
  EXPECT_EQ(number(rows.t()), number(rows.t().contiguous()));
  // So large that it is not copied whole: columns of a matrix, as tensor parallelism has them.
  const at::Tensor matrix = at::rand({3000, 4000});
  const at::Tensor columns = matrix.narrow(1, 0, 2000);
  const int64_t before = number(columns);
  matrix[2999][2000] += 1;
  EXPECT_EQ(number(columns), before);
  matrix[2999][1999] += 1;
  EXPECT_NE(number(columns), before);
  EXPECT_EQ(number(at::empty({0})), number(at::empty({0})));
}

TEST(FaultText, IsParsedStrictly) {
  using Action = train::Fault::Action;
  const auto faults = train::parse_faults(
      "rank=2,step=7,action=flip:a.weight:5:31;step=1,rank=0,action=sleep:0.5;"
      "rank=0,step=9,action=exit:3,once=a file;rank=1,step=2,action=nan_grad:b");
  ASSERT_EQ(faults.size(), 4U);
  EXPECT_EQ(faults[0].action, Action::flip);
  EXPECT_EQ(faults[0].rank, 2);
  EXPECT_EQ(faults[0].step, 7);
  EXPECT_EQ(faults[0].name, "a.weight");
  EXPECT_EQ(faults[0].element, 5);
  EXPECT_EQ(faults[0].bit, 31);
  EXPECT_EQ(faults[1].action, Action::sleep);
  EXPECT_EQ(faults[1].number, 0.5);
  EXPECT_EQ(faults[2].number, 3);
  EXPECT_EQ(faults[2].once, "a file");
  EXPECT_EQ(faults[3].name, "b");
  for (const char* const bad :
       {"", "rank=1", "rank=1,step=2", "rank=1,step=2,action=fly", "rank=1,step=0,action=nan",
        "rank=-1,step=2,action=nan", "rank=1,step=2,action=nan,rank=1", "rank=1,step=2,action=nan;",
        "rank=1,step=2,action=nan:1", "rank=1,step=2,action=exit", "rank=1,step=2,action=exit:256",
        "rank=1,step=2,action=sleep:x", "rank=1,step=2,action=scale:nan",
        "rank=1,step=2,action=flip:a:1", "rank=1,step=2,action=flip::1:1",
        "rank=1,step=2,action=flip:a:1:64",
        "rank=1,step=2,action=nan,once=", "rank=1,step=2,action=nan_grad:", "a=1"}) {
    EXPECT_THAT([&] { train::parse_faults(bad); }, refused("LOCKSTEP_FAULT ... rank=R,step=S"))
        << bad;
  }
}

class Integrity : public Train {
 protected:
  // What a run logs that must succeed.
  std::string log_of(const std::string& name, const Words& options) const {
    testing::internal::CaptureStderr();
    EXPECT_NO_THROW(steps_or_throw(name, options));
    return testing::internal::GetCapturedStderr();
  }
  auto failing(const std::string& name, const Words& options) const {
    return [=, this] { steps_or_throw(name, options); };
  }
  std::vector<json> steps_of(const std::string& name) const {
    return read_steps(path(name + ".jsonl"));
  }
  // All bytes of the tensors in a checkpoint.
  std::string weights_of(const std::string& name, const std::string& step) const {
    std::vector<fs::path> files;
    for (const auto& entry : fs::directory_iterator(path(name) + "/" + step)) {
      if (entry.path().extension() == ".safetensors") files.push_back(entry.path());
    }
    EXPECT_FALSE(files.empty());
    std::sort(files.begin(), files.end());
    std::string all;
    for (const fs::path& file : files) all += read_file(file.string());
    return all;
  }
};

const Words kShort{"--train.steps", "12", "--train.global_batch", "24"};
const Words kRepair{"--train.verify_every", "4", "--train.on_corruption", "repair"};

struct Corrupt {
  const char* name;
  Words layout;
  const char* tensor;
  int rank;
  const char* agree;  // of the holders

  std::string fault() const {
    return "rank=" + std::to_string(rank) + ",step=8,action=flip:" + tensor + ":5:12";
  }
  std::string facts() const {
    return "step 8 ... rank " + std::to_string(rank) + " ... " + tensor + " ... " + agree;
  }
};

const std::vector<Corrupt>& corrupt_runs() {
  static const std::vector<Corrupt> all{
      {"dp3", {"-n", "3"}, "blocks.1.mlp.down.weight", 2, "2 of 3"},
      {"dp4", {"-n", "4", "--train.global_batch", "16"}, "optim.embed.weight.exp_avg", 0, "3 of 4"},
      {"tp2dp2", {"-n", "4", "--parallel.tp", "2"}, "blocks.0.norm1.weight", 1, "3 of 4"},
      {"hybrid",
       {"-n", "6", "--parallel.shard", "hybrid", "--parallel.shard_size", "2"},
       "blocks.0.attention.qkv.weight",
       4,
       "2 of 3"},
      {"pp2dp3", {"-n", "6", "--parallel.pp", "2"}, "optim.norm.weight.exp_avg_sq", 5, "2 of 3"}};
  return all;
}

TEST_F(Integrity, ARankThatDiffersFromTheMajorityIsNamed) {
  for (const Corrupt& run : corrupt_runs()) {
    SCOPED_TRACE(run.name);
    const Faults faults(run.fault());
    EXPECT_THAT(failing(run.name, kShort + run.layout + Words{"--train.verify_every", "4"}),
                ThrowsMessage<Error>(says(run.facts())));
  }
}

TEST_F(Integrity, ARepairedRunHasTheBitsOfAnUnharmedOne) {
  for (const Corrupt& run : corrupt_runs()) {
    if (!tests_all() && run.layout[1] == "4") continue;
    SCOPED_TRACE(run.name);
    // Without any check: none changes a loss. On a GPU two runs may differ in the last bits.
    const std::string name = run.name, other = name + "-unharmed";
    EXPECT_NO_THROW(steps_or_throw(
        other, kShort + run.layout + Words{"--train.verify_every", "0", "--train.device", "cpu"}));
    const auto unharmed = steps_of(other);
    const Faults faults(run.fault());
    EXPECT_THAT(log_of(name, kShort + run.layout + kRepair + Words{"--train.device", "cpu"}),
                says(run.facts() + " ... repaired"));
    EXPECT_EQ(losses(steps_of(name)), losses(unharmed));
    EXPECT_EQ(weights_of(name, "step-00000012"), weights_of(other, "step-00000012"));
  }
}

// Parameters whose codes are in host memory are decoded for it, and all state of a tensor is
// mended.
TEST_F(Integrity, OffloadedStateIsComparedAndRepaired) {
  const Words options = kShort + Words{"-n",
                                       "3",
                                       "--train.device",
                                       "cpu",
                                       "--offload.params",
                                       "true",
                                       "--offload.optimizer",
                                       "true",
                                       "--offload.strategy",
                                       "extreme",
                                       "--offload.codec",
                                       "params=bf16"};
  EXPECT_NO_THROW(steps_or_throw("unharmed", options + Words{"--train.verify_every", "0"}));
  const auto unharmed = steps_of("unharmed");
  const std::string tensor = "blocks.1.mlp.down.weight", flip = "rank=2,step=8,action=flip:";
  const Faults faults(flip + "optim." + tensor + ".exp_avg:5:12;" + flip + "optim." + tensor +
                      ".exp_avg_sq:7:12");
  EXPECT_THAT(log_of("repaired", options + kRepair),
              says("step 8 ... rank 2 ... 2 of 3 ... 1 more ... repaired"));
  EXPECT_EQ(losses(steps_of("repaired")), losses(unharmed));
  EXPECT_EQ(weights_of("repaired", "step-00000012"), weights_of("unharmed", "step-00000012"));
}

TEST_F(Integrity, WithoutAMajorityARunStops) {
  const Words hybrid{"-n", "4", "--parallel.shard", "hybrid", "--parallel.shard_size", "2"};
  for (const Words& layout : {Words{"-n", "2"}, hybrid}) {
    const Faults faults("rank=1,step=3,action=flip:embed.weight:0:0");
    EXPECT_THAT(failing("two", layout + kRepair + Words{"--train.verify_every", "1"}),
                ThrowsMessage<Error>(AllOf(says("step 3 ... embed.weight ... no majority"),
                                           says("rank 1 ... 2 holders"))));
  }
}

TEST_F(Integrity, ACorruptWeightIsNotSaved) {
  const Faults faults("rank=1,step=10,action=flip:embed.weight:3:30");
  EXPECT_THAT(failing("saved", {"-n", "3", "--train.global_batch", "6", "--checkpoint.every", "5"}),
              ThrowsMessage<Error>(says("step 10 ... rank 1")));
  EXPECT_TRUE(fs::exists(path("saved/step-00000005")));
  EXPECT_FALSE(fs::exists(path("saved/step-00000010")));
}

// 1.0 becomes infinite: the rank's loss is NaN until its weight is mended.
TEST_F(Integrity, ABadStepIsFollowedByAVote) {
  const Faults faults("rank=2,step=3,action=flip:norm.weight:7:30");
  const std::string log =
      log_of("bad", {"-n", "3", "--train.global_batch", "6", "--train.on_corruption", "repair"});
  EXPECT_THAT(log, says("step 4 ... rank 2 (its loss)"));
  EXPECT_THAT(log, says("step 3 ... norm.weight ... 2 of 3 ... repaired"));
  EXPECT_THAT(log, Not(HasSubstr("skipped")));
  EXPECT_THAT(log, Not(HasSubstr("step 5")));
}

TEST_F(Integrity, VerifyEveryZeroComparesNothing) {
  const Faults faults("rank=1,step=10,action=flip:embed.weight:3:3");
  EXPECT_NO_THROW(steps_or_throw("off", {"-n", "2", "--train.verify_every", "0"}));
}

// A step is computed again before it counts as bad.
std::string twice(const std::string& fault) { return fault + ";" + fault; }

TEST_F(Integrity, AStepThatIsNotFiniteIsComputedAgain) {
  const std::vector<std::pair<std::string, Words>> runs{
      {"ddp", {"-n", "2", "--train.on_spike", "skip"}},
      {"dropout", {"-n", "2", "--parallel.shard", "full", "--model.dropout", "0.2"}},
      {"pp2tp2", {"-n", "4", "--parallel.pp", "2", "--parallel.tp", "2"}},
      {"offload", {"-n", "2", "--offload.grads", "true", "--offload.optimizer", "true"}},
      {"fp8",
       {"-n", "2", "--train.precision", "fp8", "--train.dtype", "float32", "--train.fp8_min",
        "0"}}};
  for (const auto& [name, layout] : runs) {
    SCOPED_TRACE(name);
    const Words options = Words{"--train.device", "cpu", "--train.steps", "6"} + layout;
    EXPECT_NO_THROW(steps_or_throw(name, options));
    const auto expected = steps_of(name);
    const Faults faults(
        "rank=1,step=3,action=nan;rank=0,step=5,action=nan_grad:blocks.0.mlp.up.weight");
    const std::string again = name + "-again";
    EXPECT_THAT(log_of(again, options), says("step 3 ... rank 1 (its loss) ... again"));
    EXPECT_EQ(losses(steps_of(again)), losses(expected));
    EXPECT_EQ(weights_of(again, "step-00000006"), weights_of(name, "step-00000006"));
  }
}

TEST_F(Integrity, GradientsThatAreNotFiniteNameRankParameterAndStep) {
  const std::vector<std::pair<std::string, Words>> runs{
      {"ddp", {}},
      {"full", {"--parallel.shard", "full"}},
      {"optimizer", {"--parallel.shard", "optimizer", "--train.reproducible", "true"}},
      {"pp", {"--parallel.pp", "2"}}};
  for (const auto& [name, layout] : runs) {
    SCOPED_TRACE(name);
    const Faults faults(twice("rank=3,step=2,action=nan_grad:blocks.1.mlp.up.weight"));
    const std::string log = log_of(name, Words{"-n", "4", "--train.steps", "5"} + layout);
    EXPECT_THAT(log, says("step 2 ... rank 3 ... blocks.1.mlp.up.weight"));
    EXPECT_THAT(log, Not(HasSubstr("rank 2")));
    const auto all = steps_of(name);
    ASSERT_EQ(all.size(), 5U);
    EXPECT_TRUE(all[1].contains("skipped"));
    for (const double loss : losses(all)) EXPECT_TRUE(std::isfinite(loss));
  }
  const Faults faults(twice("rank=1,step=3,action=nan"));
  EXPECT_THAT(failing("stop", {"-n", "2", "--train.on_nonfinite", "stop"}),
              ThrowsMessage<Error>(says("step 3 ... rank 1 (its loss) ... train.on_nonfinite")));
}

const Words kTwo{"-n", "2", "--checkpoint.every", "5", "--checkpoint.keep", "1"};
constexpr const char* kSpike = "rank=1,step=15,action=scale:100";

TEST_F(Integrity, ASpikeIsAWarningAndReplacesNoCheckpoint) {
  const Faults faults(kSpike);
  EXPECT_THAT(log_of("warn", kTwo + Words{"--train.steps", "15"}),
              says("step 15 ... train.spike_factor 10 ... median"));
  // The last weights are saved, but the good ones stay.
  EXPECT_FALSE(fs::exists(path("warn/step-00000005")));
  EXPECT_TRUE(fs::exists(path("warn/step-00000010")));
  EXPECT_TRUE(fs::exists(path("warn/step-00000015")));
}

TEST_F(Integrity, ASpikeIsSkippedOnAllRanks) {
  const Words options = kTwo + Words{"--train.on_spike", "skip"};
  {
    const Faults faults(kSpike);
    EXPECT_THAT(log_of("skip", options), says("step 15 ... skipped"));
  }
  const Faults faults(twice("rank=0,step=15,action=nan"));  // is skipped too
  log_of("same", options);
  const auto found = steps_of("skip"), same = steps_of("same");
  ASSERT_EQ(found.size(), 20U);
  EXPECT_TRUE(found[14].contains("skipped"));
  EXPECT_GT(found[14]["loss"].get<double>(), 10 * found[13]["loss"].get<double>());
  for (const size_t i : {13, 15, 19}) EXPECT_EQ(found[i]["loss"], same[i]["loss"]) << i;
}

TEST_F(Integrity, ASpikeStopsTheRun) {
  const Words options = kTwo + Words{"--train.on_spike", "stop"};
  const Faults faults(kSpike);
  EXPECT_THAT(failing("stop", options),
              ThrowsMessage<Error>(says("step 15 ... train.on_spike is stop")));
  // Another factor lets it pass.
  EXPECT_NO_THROW(steps_or_throw("high", options + Words{"--train.spike_factor", "1000"}));
}

TEST_F(Integrity, ABadStepIsRolledBack) {
  for (const bool spike : {true, false}) {
    const std::string option = spike ? "on_spike" : "on_nonfinite";
    SCOPED_TRACE(option);
    const Faults faults(spike ? kSpike : twice("rank=1,step=13,action=nan"));
    testing::internal::CaptureStdout();
    EXPECT_THAT(log_of(option, kTwo + Words{"--train." + option, "rollback"}),
                says(spike ? "step 15" : "step 13 ... rank 1"));
    EXPECT_THAT(
        testing::internal::GetCapturedStdout(),
        says(spike ? "step 15 ... step 10 ... 40 in all" : "step 13 ... step 10 ... 24 in all"));
    const auto all = steps_of(option);
    ASSERT_EQ(all.size(), 20U);
    for (size_t i = 0; i < all.size(); ++i) {
      EXPECT_EQ(all[i]["step"], i + 1);
      EXPECT_LT(all[i]["loss"].get<double>(), 7);
    }
    // Each step takes samples of its own, those that were rolled back too.
    const json manifest = json::parse(read_file(path(option) + "/step-00000020/manifest.json"));
    EXPECT_EQ(manifest["state"]["samples"], spike ? 200 : 184);
  }
}

TEST_F(Integrity, ABadStepThatUpdatedInBackwardIsRolledBack) {
  const Faults faults("rank=1,step=8,action=nan");
  EXPECT_THAT(
      log_of("undone", kTwo + Words{"--train.steps", "12", "--train.on_nonfinite", "rollback",
                                    "--parallel.shard", "full", "--offload.optimizer", "true",
                                    "--offload.grads", "true", "--offload.clip_mode", "none",
                                    "--optim.clip", "0"}),
      says("step 8 ... rank 1"));
  const auto all = steps_of("undone");
  ASSERT_EQ(all.size(), 12U);
  for (const double loss : losses(all)) EXPECT_LT(loss, 7);
}

TEST_F(Integrity, RollbacksWithoutProgressEnd) {
  std::string text = kSpike;
  for (int i = 0; i < 3; ++i) text += std::string(";") + kSpike;
  const Faults faults(text);
  EXPECT_THAT(failing("again", kTwo + Words{"--train.on_spike", "rollback"}),
              ThrowsMessage<Error>(says("step 15 ... 3 times")));
}

TEST_F(Integrity, OptionsThatContradictAreRefused) {
  const auto with = [&](const Words& options) { return failing("refused", options); };
  EXPECT_THAT(with({"--train.on_spike", "rollback"}),
              refused("train.on_spike is rollback ... checkpoint.every is 0"));
  EXPECT_THAT(with({"--train.on_nonfinite", "rollback"}),
              refused("train.on_nonfinite is rollback ... checkpoint.every is 0"));
  EXPECT_THAT(with({"--train.spike_factor", "1"}), refused("train.spike_factor ... 1"));
  EXPECT_THAT(with({"--train.on_spike", "skip", "--offload.optimizer", "true",
                    "--offload.clip_mode", "none", "--optim.clip", "0"}),
              refused("train.on_spike is skip ... offload.clip_mode is none"));
}

TEST_F(Integrity, FaultsEndRanks) {
  {
    const Faults faults("rank=0,step=1,action=fly");
    const Result result = run({"-n", "2"});
    EXPECT_EQ(result.code, 2);
    EXPECT_THAT(result.err, says("LOCKSTEP_FAULT ... fly ... nan_grad:PARAMETER"));
  }
  {
    const Faults faults("rank=2,step=1,action=nan");
    EXPECT_THAT(failing("absent", {"-n", "2"}), refused("LOCKSTEP_FAULT ... rank 2 ... 2 ranks"));
  }
  {
    const Faults faults("rank=1,step=2,action=sleep:0;rank=1,step=3,action=throw");
    EXPECT_THAT(failing("throw", {"-n", "2"}), ThrowsMessage<Error>(says("rank 1 ... step 3")));
  }
  for (const char* const action : {"kill", "exit:9"}) {
    const Faults faults(std::string("rank=1,step=2,action=") + action);
    const Result result = run({"-n", "2"});
    EXPECT_NE(result.code, 0);
    EXPECT_THAT(result.err, says("rank 1 ... 9")) << action;
  }
}

}  // namespace
}  // namespace lockstep::test
