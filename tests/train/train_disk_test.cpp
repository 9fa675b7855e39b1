// SPDX-License-Identifier: Apache-2.0
// Training with activations on disk: the command, its folder, its trace, its refusals.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>

#include "tests/support/says.h"
#include "tests/train/train_command.h"

namespace lockstep::test {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;
using testing::Not;

class TrainDisk : public Train {
 protected:
  TrainDisk() { fs::create_directory(disk()); }
  std::string disk() const { return path("disk"); }
  Words extreme() const { return {"--memory.strategy", "extreme", "--memory.disk", disk()}; }

  const Words model_{"--model.layers", "4", "--train.steps", "8", "--model.dropout", "0.1"};
};

TEST_F(TrainDisk, IsTheSameBitsAsInMemory) {
  const std::vector<Words> layouts{
      {"-n", "1"},
      {"-n", "2", "--parallel.shard", "full", "--model.kind", "llama"},
      {"-n", "2", "--parallel.pp", "2", "--train.recompute", "none"},
      {"-n", "2", "--parallel.pp", "2", "--parallel.schedule", "zb-v", "--parallel.chunks", "2"}};
  int number = 0;
  for (const Words& layout : layouts) {
    const std::string name = std::to_string(number++);
    const Words all = model_ + layout;
    const auto expected = steps("memory" + name, all + Words{"--memory.strategy", "aggressive"});
    const auto found = steps("disk" + name, all + extreme());
    EXPECT_EQ(losses(found), losses(expected)) << name;
    ASSERT_EQ(found.size(), 8U);
    EXPECT_EQ(found.back()["grad_norm"], expected.back()["grad_norm"]) << name;
    EXPECT_TRUE(fs::is_empty(disk()));
  }
}

struct TraceSpan {
  double start, end;
};

std::map<std::string, std::vector<TraceSpan>> read_trace(const std::string& folder) {
  std::map<std::string, std::vector<TraceSpan>> spans;
  for (const auto& file : fs::directory_iterator(folder)) {
    for (const json& event : json::parse(read_file(file.path()))) {
      if (event["ph"] != "X") continue;
      const double start = event["ts"];
      spans[event["name"]].push_back({start, start + event["dur"].get<double>()});
    }
  }
  return spans;
}

TEST_F(TrainDisk, TheDiskReadsWhileBlocksAreComputed) {
  run(model_ + extreme() +
      Words{"-n", "1", "--train.steps", "3", "--train.seq_len", "128", "--metrics.trace",
            path("trace")});
  const auto spans = read_trace(path("trace"));
  ASSERT_TRUE(spans.contains("disk read"));
  ASSERT_TRUE(spans.contains("disk write"));
  ASSERT_TRUE(spans.contains("recompute"));
  const auto& computed = spans.at("recompute");
  const auto overlaps = [&](const TraceSpan& read) {
    return std::any_of(computed.begin(), computed.end(), [&](const TraceSpan& span) {
      return std::max(span.start, read.start) < std::min(span.end, read.end);
    });
  };
  const auto& reads = spans.at("disk read");
  EXPECT_TRUE(std::any_of(reads.begin(), reads.end(), overlaps));
}

TEST_F(TrainDisk, WithoutAFolderItIsTheTemporaryOne) {
  const Words options = model_ + Words{"-n", "1", "--memory.strategy", "extreme"};
  const Result missing = lockstep_command(command(options), {"TMPDIR=" + path("missing")});
  EXPECT_EQ(missing.code, 2);
  EXPECT_THAT(missing.err, HasSubstr("memory.disk: " + path("missing")));
  const Result found = lockstep_command(command(options), {"TMPDIR=" + disk()});
  EXPECT_EQ(found.code, 0) << found.err;
}

TEST_F(TrainDisk, AFolderThatIsNoneIsOneLineBeforeRanksStart) {
  write_file(path("file"), "x");
  for (const char* name : {"missing", "file"}) {
    const Result result =
        run(model_ + Words{"-n", "2", "--memory.strategy", "extreme", "--memory.disk", path(name)});
    EXPECT_EQ(result.code, 2);
    EXPECT_THAT(result.err, says("memory.disk: " + path(name) + " ... not a folder"));
    EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
    EXPECT_THAT(result.err, Not(HasSubstr("rank0")));
  }
}

// A disk that is full ends the run with a line that says so. The limit is that of a file's size.
TEST_F(TrainDisk, AFullDiskIsSaid) {
  std::string line = "ulimit -f 200; exec " + std::string(LOCKSTEP_COMMAND);
  for (const std::string& word :
       command(model_ + extreme() +
               Words{"-n", "1", "--train.seq_len", "256", "--model.hidden", "128",
                     "--checkpoint.dir", "", "--metrics.file", ""})) {
    line += " '" + word + "'";
  }
  Subprocess shell({"sh", "-c", line});
  const Result result = shell.wait(milliseconds{120'000});
  EXPECT_NE(result.code, 0);
  EXPECT_THAT(result.err, says("[disk store] ... 262144 bytes ... " + disk()));
  EXPECT_THAT(result.err, HasSubstr("File too large"));
  EXPECT_TRUE(fs::is_empty(disk()));
}

}  // namespace
}  // namespace lockstep::test
