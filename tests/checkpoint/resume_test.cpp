// SPDX-License-Identifier: Apache-2.0
// Which checkpoint a job resumes from: the newest that is sound, on all ranks the same.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <map>
#include <random>
#include <thread>

#include "lockstep/checkpoint/checkpoint.h"
#include "lockstep/core/error.h"
#include "lockstep/formats/checkpoint_folder.h"
#include "tests/support/sampling.h"
#include "tests/support/subprocess.h"

namespace lockstep::checkpoint {
namespace resume_test {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::HasSubstr;

// Two tensors, each rank's rows of one and the whole of the other. Values are those of the step.
struct Model {
  Model(const comm::Group& group, double value)
      : rows(at::full({group.size(), 30}, value)), scale(at::full({5}, value)) {
    const auto whole = layout::Placement::whole("rows", {group.size(), 30}, {"dp"});
    mine = rows.narrow(0, group.rank(), 1).clone();
    slices = {{whole.narrow(0, {group.rank(), group.rank() + 1}, "dp"), mine},
              {layout::Placement::whole("scale", {5}, {"dp"}), scale}};
  }
  bool has(double value) const {
    return mine.eq(value).all().item<bool>() && scale.eq(value).all().item<bool>();
  }
  at::Tensor rows, scale, mine;
  std::vector<NamedSlice> slices;
};

void save_steps(const std::string& dir, int steps, const comm::Group& group = {}) {
  for (int64_t step = 1; step <= steps; ++step) {
    save(dir, {.step = step, .slices = Model(group, static_cast<double>(step)).slices}, group);
  }
}

std::vector<std::string> files_in(const std::string& folder) {
  std::vector<std::string> files;
  for (const auto& entry : fs::directory_iterator(folder)) files.push_back(entry.path());
  std::sort(files.begin(), files.end());
  return files;
}

std::string flipped(std::string bytes, size_t bit) {
  bytes[bit / 8] = static_cast<char>(bytes[bit / 8] ^ (1 << bit % 8));
  return bytes;
}

// One bit anywhere in the newest, or in the two newest: the one before is resumed from, and all its
// values are there.
TEST(Resume, FallsBackFromAnyFlippedBit) {
  const test::TempDir folder;
  save_steps(folder.path(), 3);
  const auto newest = files_in(folder.path() + "/step-00000003");
  const auto second = files_in(folder.path() + "/step-00000002");
  const int flips = test::tests_all() ? 1000 : 60;
  std::mt19937 random(1);
  for (int i = 0; i < flips; ++i) {
    const bool both = i % 10 == 0;
    std::map<std::string, std::string> before;
    for (const auto* files : {&newest, &second}) {
      if (files == &second && !both) continue;
      const std::string& file = (*files)[random() % files->size()];
      before[file] = test::read_file(file);
      test::write_file(file, flipped(before[file], random() % (8 * before[file].size())));
    }
    Model model({}, 0);
    const auto resumed = load_newest(folder.path(), model.slices);
    ASSERT_TRUE(resumed) << i;
    ASSERT_EQ(resumed->step, both ? 1 : 2) << i;
    ASSERT_TRUE(model.has(both ? 1 : 2)) << i;
    for (const auto& [file, bytes] : before) test::write_file(file, bytes);
  }
  Model model({}, 0);
  EXPECT_EQ(load_newest(folder.path(), model.slices)->step, 3);
  EXPECT_TRUE(model.has(3));
}

// What one rank alone reads is damaged: all go back.
TEST(Resume, AllRanksTakeTheSame) {
  const test::TempDir folder;
  std::atomic<int> right = 0;
  comm::run_threads(3, [&](const comm::Group& group) { save_steps(folder.path(), 2, group); });
  const std::string file =
      folder.path() + "/step-00000002/shard-00003-model-00001-of-00001.safetensors";
  const std::string bytes = test::read_file(file);
  test::write_file(file, flipped(bytes, 8 * bytes.size() - 1));
  comm::run_threads(3, [&](const comm::Group& group) {
    Model model(group, 0);
    const auto resumed = load_newest(folder.path(), model.slices, group);
    if (resumed->step == 1 && model.has(1)) ++right;
    if (damage_in(folder.path() + "/step-00000002", group).find(file) != std::string::npos) ++right;
  });
  EXPECT_EQ(right, 6);
}

TEST(Resume, RefusesWhereNoneIsSound) {
  const test::TempDir folder;
  Model model({}, 0);
  EXPECT_EQ(load_newest(folder.path() + "/none", model.slices), std::nullopt);
  save_steps(folder.path(), 2);
  for (const char* step : {"/step-00000001", "/step-00000002"}) {
    const std::string file = folder.path() + step + "/shard-00001-model-00001-of-00001.safetensors";
    const std::string bytes = test::read_file(file);
    test::write_file(file, flipped(bytes, 8 * bytes.size() - 1));
  }
  EXPECT_THAT([&] { load_newest(folder.path(), model.slices); },
              testing::ThrowsMessage<ConfigError>(
                  AllOf(HasSubstr("none of the 2 checkpoints"), HasSubstr("step-00000002/shard"))));
}

// An older checkpoint would not fit either; nobody wants to lose the steps between by mistake.
TEST(Resume, AnotherModelIsNoDamage) {
  const test::TempDir folder;
  save_steps(folder.path(), 2);
  Model model({}, 0);
  model.slices.pop_back();
  EXPECT_THAT([&] { load_newest(folder.path(), model.slices); },
              testing::ThrowsMessage<CheckpointError>(HasSubstr("scale")));
}

// The folder's newest is gone before old ones are counted.
TEST(Resume, ACheckpointMovedAwayAfterItsCommitIsAWarning) {
  const test::TempDir folder;
  const std::string moved = folder.path() + "/moved";
  std::atomic<bool> done = false;
  std::thread mover([&] {
    int64_t step = 1;
    while (!done) {
      std::error_code missing;
      const auto from = folder.path() + "/dir/" + formats::step_folder_name(step);
      fs::rename(from, moved + std::to_string(step), missing);
      if (!missing) ++step;
    }
  });
  for (int64_t step = 1; step <= 40; ++step) {
    save(folder.path() + "/dir", {.step = step, .slices = Model({}, 0).slices, .keep = 1});
    while (!fs::exists(moved + std::to_string(step))) std::this_thread::yield();
  }
  done = true;
  mover.join();
}

}  // namespace
}  // namespace resume_test
}  // namespace lockstep::checkpoint
