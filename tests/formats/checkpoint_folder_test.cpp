// SPDX-License-Identifier: Apache-2.0
#include "lockstep/formats/checkpoint_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "lockstep/core/error.h"
#include "lockstep/formats/safetensors.h"
#include "tests/formats/save.h"
#include "tests/support/says.h"
#include "tests/support/subprocess.h"

namespace lockstep::formats {
namespace {

namespace fs = std::filesystem;
using test::says;
using test_support::save;
using test_support::write_shard;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

class Folder : public ::testing::Test {
 protected:
  std::vector<std::string> names() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(dir_)) {
      names.push_back(entry.path().filename().string());
    }
    std::sort(names.begin(), names.end());
    return names;
  }
  std::vector<int64_t> steps() const {
    std::vector<int64_t> steps;
    for (const auto& checkpoint : list_complete(dir_)) steps.push_back(checkpoint.step);
    return steps;
  }

  test::TempDir temp_;
  const std::string dir_ = temp_.path() + "/a/b";
};

TEST_F(Folder, SavesAndFinds) {
  EXPECT_EQ(newest_complete(dir_), std::nullopt);
  EXPECT_TRUE(list_complete(dir_).empty());
  check_writable(dir_);
  EXPECT_TRUE(names().empty());
  EXPECT_EQ(save(dir_, 100), dir_ + "/step-00000100");
  save(dir_, 9);
  save(dir_, 123'456'789);
  EXPECT_THAT(names(), ElementsAre("step-00000009", "step-00000100", "step-123456789"));
  EXPECT_THAT(steps(), ElementsAre(9, 100, 123'456'789));
  EXPECT_EQ(newest_complete(dir_), (Checkpoint{123'456'789, dir_ + "/step-123456789"}));
  const auto manifest = verify(dir_ + "/step-00000100");
  EXPECT_EQ(manifest.step, 100);
  EXPECT_EQ(manifest.tensors.at("w").slices.size(), 2u);
}

TEST_F(Folder, OtherNamesAreNotCheckpoints) {
  save(dir_, 1);
  for (const char* name : {"step-00000002.tmp", "step-2", "step-00000003x", "step-", "other"}) {
    fs::copy(dir_ + "/step-00000001", dir_ + "/" + name);
  }
  fs::create_directory(dir_ + "/step-00000004");
  EXPECT_THAT(steps(), ElementsAre(1));
  EXPECT_EQ(newest_complete(dir_)->step, 1);
}

TEST_F(Folder, Metadata) {
  save(dir_, 1);
  const SafetensorsFile file(dir_ + "/step-00000001/" + shard_file_name(2));
  EXPECT_EQ(file.metadata().at("format"), "pt");
  EXPECT_EQ(file.metadata().at("DCP_VERSION"), "1.0");
  EXPECT_EQ(file.metadata().at("DCP_SHARDING_INFO"), R"({"w":{"saved_offsets":[4,0]}})");
  write_shard(dir_, "x", {{"w", "U8", {4}, {{{2, 3}}}}, {"s", "I64", {}, {{{0, 1}}}}}, 0);
  EXPECT_EQ(SafetensorsFile(dir_ + "/x").metadata().at("DCP_SHARDING_INFO"),
            R"({"s":{"saved_offsets":[]},"w":{"saved_offsets":[2]}})");
  EXPECT_THAT(
      [&] {
        write_shard(dir_, "x", {{"w", "U8", {4}, {{{2, 3}}}}, {"w", "U8", {4}, {{{0, 1}}}}}, 0);
      },
      ThrowsMessage<ConfigError>(HasSubstr("tensor w is named twice")));
}

TEST_F(Folder, Replaces) {
  save(dir_, 5, 1);
  save(dir_, 5, 2);
  EXPECT_THAT(names(), ElementsAre("step-00000005"));
  EXPECT_EQ(verify(dir_ + "/step-00000005").state.at("seed"), "2");
}

// The moment between the two renames of a replacement.
TEST_F(Folder, FindsWhatWasSetAside) {
  save(dir_, 5, 1);
  fs::rename(dir_ + "/step-00000005", dir_ + "/step-00000005.old");
  EXPECT_EQ(newest_complete(dir_), (Checkpoint{5, dir_ + "/step-00000005.old"}));
  verify(newest_complete(dir_)->path);
  begin_checkpoint(dir_, 5);  // puts it back, so that it is not lost if this is cut off too
  EXPECT_EQ(newest_complete(dir_)->path, dir_ + "/step-00000005");
  save(dir_, 5, 2);
  EXPECT_THAT(names(), ElementsAre("step-00000005"));

  fs::rename(dir_ + "/step-00000005", dir_ + "/step-00000005.old");
  prune(dir_, 1);
  EXPECT_THAT(names(), ElementsAre("step-00000005"));
  fs::copy(dir_ + "/step-00000005", dir_ + "/step-00000005.old");
  EXPECT_EQ(newest_complete(dir_)->path, dir_ + "/step-00000005");
  prune(dir_, 1);
  EXPECT_THAT(names(), ElementsAre("step-00000005"));
}

TEST_F(Folder, SkipsDamaged) {
  for (int step = 1; step <= 6; ++step) save(dir_, step);
  const auto at = [&](int step) { return dir_ + "/" + step_folder_name(step) + "/"; };
  fs::resize_file(at(6) + "manifest.json", 100);
  fs::resize_file(at(5) + "manifest.json", 0);
  fs::remove(at(4) + shard_file_name(2));
  fs::resize_file(at(3) + shard_file_name(1), 10);
  fs::remove_all(at(2));
  fs::copy(at(1), at(2));  // a manifest of another step
  EXPECT_EQ(newest_complete(dir_)->step, 1);
  EXPECT_EQ(steps().size(), 6u);
  // A damaged one neither counts nor goes.
  prune(dir_, 1);
  EXPECT_EQ(steps().size(), 6u);
}

TEST_F(Folder, VerifyNamesTheFile) {
  const auto damaged = [&](const auto& damage, const std::string& rule) {
    const auto path = save(dir_, 1);
    damage(path);
    EXPECT_THAT([&] { verify(path); },
                ThrowsMessage<CheckpointError>(AllOf(HasSubstr(path), says(rule))));
  };
  const auto shard = shard_file_name(2);
  damaged(
      [&](const auto& path) {
        std::fstream file(path + "/" + shard, std::ios::in | std::ios::out);
        file.seekp(-1, std::ios::end);
        file.put('x');
      },
      shard + ": ");
  damaged([&](const auto& path) { fs::resize_file(path + "/" + shard, 7); }, "has 7 bytes");
  damaged([&](const auto& path) { fs::remove(path + "/" + shard); }, shard);

  // Files that are whole, but not what the manifest says.
  const auto wrong = [&](const std::vector<ShardSlice>& slices, const std::string& rule) {
    const auto folder = begin_checkpoint(dir_, 2);
    const std::vector<ShardSlice> declared = {{"w", "F32", {4}, {{{0, 4}}}}};
    commit_checkpoint(dir_,
                      shard_manifest(2, shard, write_shard(folder, shard, slices, 1), declared));
    EXPECT_THAT([&] { verify(dir_ + "/step-00000002"); },
                ThrowsMessage<CheckpointError>(AllOf(HasSubstr(shard), says(rule))));
  };
  wrong({{"v", "F32", {4}, {{{0, 4}}}}}, "has no tensor w");
  wrong({{"w", "I32", {4}, {{{0, 4}}}}}, "tensor w is I32 (4), the manifest says F32 (4)");
  wrong({{"w", "F32", {4}, {{{0, 3}}}}}, "tensor w is F32 (3)");
  wrong({{"w", "F32", {4}, {{{0, 4}}}}, {"v", "U8", {}, {{{0, 1}}}}}, "tensor v ... manifest");
}

TEST_F(Folder, CommitChecksFirst) {
  save(dir_, 1);
  const auto folder = begin_checkpoint(dir_, 1);
  const std::vector<ShardSlice> half = {{"w", "F32", {8}, {{{0, 4}}}}};
  const auto record = write_shard(folder, "f", half, 0);
  EXPECT_THAT([&] { commit_checkpoint(dir_, shard_manifest(1, "f", record, half)); },
              ThrowsMessage<CheckpointError>(HasSubstr("missing: [4:8]")));
  const std::vector<ShardSlice> whole = {{"w", "F32", {4}, {{{0, 4}}}}};
  EXPECT_THAT([&] { commit_checkpoint(dir_, shard_manifest(1, "g", record, whole)); },
              ThrowsMessage<CheckpointError>(HasSubstr("step-00000001.tmp/g")));
  EXPECT_THAT(
      [&] {
        commit_checkpoint(dir_, shard_manifest(1, "f", {record.bytes + 1, record.blocks}, whole));
      },
      ThrowsMessage<CheckpointError>(HasSubstr("its manifest says")));
  verify(dir_ + "/step-00000001");  // the old one is as it was
}

TEST_F(Folder, Abandons) {
  abandon_checkpoint(dir_, 1);  // nothing there is fine
  save(dir_, 1, 1);
  write_shard(begin_checkpoint(dir_, 2), "f", {{"w", "F32", {8}, {{{0, 8}}}}}, 0);
  abandon_checkpoint(dir_, 2);
  abandon_checkpoint(dir_, 1);
  EXPECT_THAT(names(), ElementsAre("step-00000001"));

  // Wherever a replacement ended, one of the two is there after it.
  const auto path = dir_ + "/step-00000001";
  begin_checkpoint(dir_, 1);
  fs::rename(path, path + ".old");
  abandon_checkpoint(dir_, 1);
  EXPECT_THAT(names(), ElementsAre("step-00000001"));
  EXPECT_EQ(verify(path).state.at("seed"), "1");
  fs::rename(path, path + ".old");
  fs::copy(path + ".old", path);
  abandon_checkpoint(dir_, 1);
  EXPECT_THAT(names(), ElementsAre("step-00000001"));
  verify(path);
}

TEST_F(Folder, Prunes) {
  for (int step = 1; step <= 5; ++step) save(dir_, step * 10);
  begin_checkpoint(dir_, 15);
  begin_checkpoint(dir_, 50);
  begin_checkpoint(dir_, 60);
  fs::create_directory(dir_ + "/mine");
  prune(dir_, 2);
  EXPECT_THAT(names(), ElementsAre("mine", "step-00000040", "step-00000050", "step-00000060.tmp"));
  prune(dir_, 7);
  EXPECT_THAT(steps(), ElementsAre(40, 50));
  EXPECT_THAT([&] { prune(dir_, 0); }, ThrowsMessage<ConfigError>(HasSubstr("keep 0")));
}

TEST_F(Folder, TheBestIsKept) {
  for (int step = 1; step <= 5; ++step) save(dir_, step * 10);
  EXPECT_EQ(best_step(dir_), std::nullopt);
  link_best(dir_, 20);
  EXPECT_EQ(best_step(dir_), 20);
  EXPECT_EQ(fs::read_symlink(dir_ + "/best"), "step-00000020");
  prune(dir_, 2);
  EXPECT_THAT(names(), ElementsAre("best", "step-00000020", "step-00000040", "step-00000050"));
  EXPECT_EQ(read_manifest(dir_ + "/best").step, 20);
  link_best(dir_, 30);  // is no longer there
  EXPECT_EQ(best_step(dir_), 20);
  link_best(dir_, 40);
  prune(dir_, 1);
  EXPECT_THAT(names(), ElementsAre("best", "step-00000040", "step-00000050"));
  EXPECT_EQ(newest_complete(dir_)->step, 50);
  fs::rename(dir_, temp_.path() + "/moved");
  EXPECT_EQ(read_manifest(temp_.path() + "/moved/best").step, 40);
}

TEST_F(Folder, CannotBeWritten) {
  test::write_file(temp_.path() + "/file", "x");
  for (const auto& dir :
       {temp_.path() + "/file", temp_.path() + "/file/sub", std::string("/proc/x")}) {
    EXPECT_THAT([&] { check_writable(dir); },
                ThrowsMessage<ConfigError>(
                    AllOf(HasSubstr("checkpoint folder " + dir), HasSubstr("cannot be written"))));
  }
  EXPECT_THROW(begin_checkpoint(dir_, -1), ConfigError);
}

}  // namespace
}  // namespace lockstep::formats
