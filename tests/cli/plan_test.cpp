// SPDX-License-Identifier: Apache-2.0
// The command `lockstep plan`, as its users meet it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <sstream>

#include "tests/support/subprocess.h"

namespace lockstep::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using Words = std::vector<std::string>;

Result plan(Words options) {
  options.insert(options.begin(), {"plan", "memory"});
  return lockstep_command(options);
}

TEST(Plan, SaysWhatEachRankTakes) {
  const TempDir folder;
  const std::string file = folder.path() + "/run.toml";
  write_file(file,
             "[model]\nlayers = 4\nhidden = 64\n[parallel]\npp = 2\n[train]\nglobal_batch = 64\n");
  const Result result = plan({"--config", file, "-n", "4", "--train.seq_len", "32"});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.out, AllOf(HasSubstr("ranks  parameters  gradients"), HasSubstr("\n0, 2 "),
                                HasSubstr("\n1, 3 "), HasSubstr("gpt: 4 layers, hidden 64"),
                                HasSubstr("vocab 256"), HasSubstr("dp 2 x tp 1 x pp 2"),
                                HasSubstr("1f1b"), HasSubstr("4 micro-batches of 8 x 32 tokens"),
                                HasSubstr("\ndevice c"), HasSubstr("no limit")));
  EXPECT_EQ(std::count(result.out.begin(), result.out.end(), '\n'), 7) << result.out;
}

TEST(Plan, TakesAsManyRanksAsTheLayoutNeeds) {
  const Result result =
      plan({"--parallel.dp", "2", "--parallel.pp", "2", "--train.global_batch", "32"});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("on 4 ranks"));
}

TEST(Plan, SaysWhetherItFits) {
  const Words large{"--model.hidden", "512", "--model.layers", "8", "--memory.max_per_device"};
  Words options = large;
  options.push_back("500MB");
  Result result = plan(options);
  EXPECT_EQ(result.code, 1);
  EXPECT_THAT(result.out, AllOf(HasSubstr("does not fit"), HasSubstr("is 500 MB")));
  options.back() = "100GB";
  result = plan(options);
  EXPECT_EQ(result.code, 0);
  EXPECT_THAT(result.out, AllOf(HasSubstr("\nfits: rank 0 takes most"), Not(HasSubstr("not fit"))));
}

// Of 100 GB, 91 % is less than an error of the prediction away from too much.
TEST(Plan, SaysWhereItFitsBarely) {
  const auto with_limit = [](const std::string& device, const std::string& limit) {
    return plan({"--model.hidden", "512", "--model.layers", "8", "--train.device", device,
                 "--memory.max_per_device", limit});
  };
  for (const std::string device : {"cpu", "cuda"}) {
    const std::string all = with_limit(device, "100GB").out;
    const std::string mark = "takes most, ";
    const size_t at = all.find(mark) + mark.size();
    const double mb =
        std::stod(all.substr(at)) * (all.substr(all.find(' ', at) + 1, 2) == "GB" ? 1024 : 1);
    const Result barely = with_limit(device, std::to_string(static_cast<int>(mb / 0.93)) + "MB");
    EXPECT_EQ(barely.code, 0) << barely.out;
    EXPECT_THAT(barely.out, AllOf(HasSubstr("\nfits barely: "), HasSubstr("7 %")));
    EXPECT_EQ(barely.out.find("CUDA context") != std::string::npos, device == "cuda");
    const Result well = with_limit(device, std::to_string(static_cast<int>(mb / 0.87)) + "MB");
    EXPECT_THAT(well.out, AllOf(HasSubstr("\nfits: "), Not(HasSubstr("barely"))));
  }
}

// A login node has no GPU.
TEST(Plan, PlansForTheDeviceThatIsNamed) {
  const Result cpu = plan({"--train.device", "cpu"}), cuda = plan({"--train.device", "cuda"});
  EXPECT_EQ(cuda.code, 0) << cuda.err;
  EXPECT_THAT(cpu.out, HasSubstr("\ndevice cpu\n"));
  EXPECT_THAT(cuda.out, HasSubstr("\ndevice cuda\n"));
  EXPECT_NE(cpu.out.substr(0, cpu.out.find("gpt")), cuda.out.substr(0, cuda.out.find("gpt")));
  EXPECT_THAT(plan({}).out, HasSubstr("as this machine's train.device auto"));
}

// The words after "would fit: ", as a user would paste them.
Words change_in(const std::string& out) {
  const std::string mark = "would fit: ";
  const size_t start = out.find(mark) + mark.size();
  std::istringstream text(out.substr(start, out.find(" (", start) - start));
  return {std::istream_iterator<std::string>(text), {}};
}

TEST(Plan, NamesAChangeThatFits) {
  const Words large{"--model.hidden", "512", "--model.layers", "8", "--train.device", "cpu"};
  const struct {
    Words options;
    const char* change;
  } cases[] = {
      // Activations are most of it.
      {{"--memory.max_per_device", "820MB"}, "--train.recompute selective ("},
      {{"-n", "4", "--train.micro_batch", "1", "--memory.max_per_device", "400MB"},
       "--parallel.shard optimizer ("},
      {{"-n", "4", "--train.micro_batch", "1", "--memory.max_per_device", "180MB"}, "--parallel."},
      {{"--train.micro_batch", "1", "--memory.max_per_device", "300MB"},
       "--offload.optimizer true"},
      {{"--parallel.dp", "1", "--optim.name", "sgd", "--memory.max_per_device", "200MB"},
       "--train.recompute full ("},
  };
  for (const auto& [more, change] : cases) {
    Words options = large;
    options.insert(options.end(), more.begin(), more.end());
    const Result result = plan(options);
    EXPECT_EQ(result.code, 1) << result.out << result.err;
    EXPECT_THAT(result.out, HasSubstr("\nwould fit: ")) << result.out;
    EXPECT_THAT(result.out, HasSubstr(change));
    const Words named = change_in(result.out);
    options.insert(options.end(), named.begin(), named.end());
    const Result again = plan(options);
    EXPECT_EQ(again.code, 0) << again.out << again.err;
    EXPECT_THAT(again.out, HasSubstr("\nfits: "));
  }
  Words options = large;
  options.insert(options.end(), {"--memory.max_per_device", "1MB"});
  EXPECT_THAT(plan(options).out, HasSubstr("\nwould fit: no "));
}

TEST(Plan, SaysWhatIsOffloaded) {
  Words options{"--model.hidden",      "512",    "--model.layers",         "8",
                "--offload.optimizer", "true",   "--offload.device_limit", "300MB",
                "--offload.strategy",  "extreme"};
  Words on_cpu = options;
  on_cpu.insert(on_cpu.end(), {"--offload.update_site", "cpu"});
  Result result = plan(on_cpu);
  EXPECT_EQ(result.code, 0) << result.err;
  // Of it 97 MB are copies of the parameters for the CPU, which updates the state.
  EXPECT_THAT(result.out,
              HasSubstr("\noffload before the first step: 298 MB on the host, 0 B on the disk\n"));
  Words on_device = options;
  on_device.insert(on_device.end(), {"--offload.update_site", "device"});
  result = plan(on_device);
  EXPECT_THAT(result.out,
              HasSubstr("\noffload before the first step: 194 MB on the host, 0 B on the disk\n"));
  options[7] = "30GB";
  result = plan(options);
  EXPECT_THAT(result.out,
              HasSubstr("\noffload before the first step: 0 B on the host, 0 B on the disk\n"));
  options[7] = "20MB";
  result = plan(options);
  EXPECT_NE(result.code, 0);
  EXPECT_THAT(result.err, HasSubstr("offload.device_limit is 20 MB"));
}

TEST(Plan, CountsTheModelsTensors) {
  Result result = lockstep_command({"plan", "inventory", "-n", "2", "--model.layers", "2"});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.out, AllOf(HasSubstr("kind "), HasSubstr("\nblocks.mlp.up "),
                                HasSubstr("\nnorms "), HasSubstr("\nall "), HasSubstr("on 2 ranks"),
                                Not(HasSubstr("owner")), Not(HasSubstr("offload"))));
  result = lockstep_command({"plan", "inventory", "-n", "2", "--list", "--model.layers", "2",
                             "--offload.params", "true"});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.out, AllOf(HasSubstr("owners\n"), HasSubstr("\npositions.weight "),
                                HasSubstr("\nblocks.1.mlp.down.weight "), HasSubstr("\noffload "),
                                HasSubstr("aggressive, before the first step: the device has "),
                                HasSubstr("\noffload parameters, aggressive; ")));
}

TEST(Plan, OwnersOfWholeTensors) {
  const Words options{"-n",
                      "2",
                      "--model.layers",
                      "2",
                      "--parallel.shard",
                      "optimizer",
                      "--parallel.shard_granularity",
                      "tensors"};
  Words list{"plan", "inventory", "--list"};
  list.insert(list.end(), options.begin(), options.end());
  Result result = lockstep_command(list);
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.out, testing::ContainsRegex("\nembed.weight [^\n]* 0\n"));
  EXPECT_THAT(result.out, testing::ContainsRegex("\npositions.weight [^\n]* 1\n"));
  EXPECT_THAT(result.out, HasSubstr("shard optimizer by whole tensors"));
  result = plan(options);
  EXPECT_THAT(result.out, testing::ContainsRegex("\nparameters: [0-9]+ tensors, [0-9]+ elements"));
}

TEST(Plan, RefusesInOneLine) {
  const struct {
    Words options;
    const char* says;
  } cases[] = {{{"--model.hidden", "7"}, "hidden"},
               {{"--parallel.pp", "2", "-n", "3"}, "parallel.pp"},
               {{"--parallel.pp", "3"}, "model.layers"},
               {{"--train.global_batch", "7"}, "global_batch"},
               {{"--data.tokenizer", "/nothing.json"}, "nothing.json"},
               {{"--config", "/nothing.toml"}, "nothing.toml"},
               {{"--model.hiden", "8"}, "hiden"}};
  for (const auto& [options, says] : cases) {
    const Result result = plan(options);
    EXPECT_NE(result.code, 0);
    EXPECT_EQ(result.out, "");
    EXPECT_THAT(result.err, HasSubstr(says));
    EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
  }
  EXPECT_THAT(lockstep_command({"plan", "speed"}).err, HasSubstr("'speed'"));
  EXPECT_NE(lockstep_command({"plan"}).code, 0);
}

}  // namespace
}  // namespace lockstep::test
