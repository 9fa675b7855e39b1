// SPDX-License-Identifier: Apache-2.0
#include "lockstep/formats/checkpoint_reader.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <random>
#include <span>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/formats/safetensors.h"
#include "tests/formats/save.h"
#include "tests/support/says.h"
#include "tests/support/subprocess.h"

namespace lockstep::formats {
namespace {

namespace fs = std::filesystem;
using layout::Box;
using test::says;
using test_support::save_numbers;
using test_support::write_numbers;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

std::vector<int32_t> read(CheckpointReader& reader, const std::string& tensor, const Box& box) {
  std::vector<int32_t> values(static_cast<size_t>(box.numel()), -1);
  reader.read(tensor, box, std::as_writable_bytes(std::span(values)));
  return values;
}

std::vector<int32_t> numbers(const layout::Shape& shape, const Box& box) {
  std::vector<int32_t> values(static_cast<size_t>(box.numel()));
  layout::for_each_run(box, Box::whole(shape), box, [&](const layout::ContiguousRun& run) {
    for (int64_t i = 0; i < run.size; ++i) {
      values[static_cast<size_t>(run.to + i)] = static_cast<int32_t>(run.from + i);
    }
  });
  return values;
}

class Reader : public ::testing::Test {
 protected:
  // Two files of several blocks, cut by columns, with a small tensor in the first; and one with a
  // tensor that is not cut.
  std::string save_large() const {
    return save_numbers(dir_, 1,
                        {{{"large", "I32", {1500, 1000}, {{{0, 1500}, {0, 600}}}},
                          {"small", "I32", {3}, Box::whole({3})}},
                         {{"large", "I32", {1500, 1000}, {{{0, 1500}, {600, 1000}}}}},
                         {{"rows", "I32", {1500, 1000}, Box::whole({1500, 1000})}}});
  }
  std::string save_small() const {
    return save_numbers(dir_, 1,
                        {{{"w", "I32", {4, 6}, {{{0, 4}, {0, 2}}}}},
                         {{"w", "I32", {4, 6}, {{{0, 4}, {2, 4}}}}},
                         {{"w", "I32", {4, 6}, {{{0, 4}, {4, 6}}}},
                          {"s", "I32", {}, Box::whole({})},
                          {"e", "I32", {0, 3}, Box::whole({0, 3})}}});
  }
  static void flip(const std::string& path, uint64_t offset) {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(static_cast<std::streamoff>(offset));
    const int byte = file.get();
    ASSERT_GE(byte, 0);
    file.seekp(static_cast<std::streamoff>(offset));
    file.put(static_cast<char>(byte ^ 0x10));
  }

  test::TempDir temp_;
  const std::string dir_ = temp_.path() + "/checkpoints";
};

TEST_F(Reader, AnyBox) {
  for (const bool verify : {true, false}) {
    CheckpointReader reader(save_large(), verify);
    std::mt19937 random(1);
    const auto range = [&](int64_t size) {
      const int64_t a = random() % (size + 1), b = random() % (size + 1);
      return layout::Range{std::min(a, b), std::max(a, b)};
    };
    for (int i = 0; i < 60; ++i) {
      const Box box = i == 0 ? Box::whole({1500, 1000}) : Box{{range(1500), range(1000)}};
      ASSERT_EQ(read(reader, "large", box), numbers({1500, 1000}, box)) << box.describe();
      const Box rows{{range(1500), {0, 1000}}};
      ASSERT_EQ(read(reader, "rows", rows), numbers({1500, 1000}, rows)) << rows.describe();
    }
    EXPECT_EQ(read(reader, "small", Box::whole({3})), (std::vector<int32_t>{0, 1, 2}));
  }
  CheckpointReader reader(save_small());
  EXPECT_EQ(read(reader, "w", Box::whole({4, 6})), numbers({4, 6}, Box::whole({4, 6})));
  EXPECT_EQ(read(reader, "s", Box::whole({})), (std::vector<int32_t>{0}));
  EXPECT_TRUE(read(reader, "e", Box::whole({0, 3})).empty());
  EXPECT_TRUE(read(reader, "w", Box{{{2, 2}, {0, 6}}}).empty());
}

TEST_F(Reader, OnlyTheBlocksThatAreNeeded) {
  const auto path = save_large();
  CheckpointReader reader(path);
  EXPECT_EQ(reader.bytes_read(), 0u);
  // Many runs, of which the first blocks of both files have all.
  const Box rows{{{100, 200}, {0, 1000}}};
  read(reader, "large", rows);
  EXPECT_EQ(reader.bytes_read(), 2 * io::kBlockBytes);
  // The file that was used last keeps its block.
  read(reader, "large", Box{{{0, 10}, {600, 1000}}});
  EXPECT_EQ(reader.bytes_read(), 2 * io::kBlockBytes);
  // Each block is read once, whatever is taken from it; the two at the ends of a tensor twice.
  CheckpointReader again(path);
  read(again, "large", Box::whole({1500, 1000}));
  const uint64_t all = fs::file_size(path + "/" + shard_file_name(1)) +
                       fs::file_size(path + "/" + shard_file_name(2));
  EXPECT_EQ(again.bytes_read(), all);
  // From the middle of block 1 to that of block 4, and the header.
  CheckpointReader third(path);
  read(third, "rows", Box{{{400, 1200}, {0, 1000}}});
  EXPECT_EQ(third.bytes_read(), 5 * io::kBlockBytes);
}

TEST_F(Reader, DamageIsNoticedInTheBlocksThatAreRead) {
  const auto path = save_large();
  const auto file = path + "/" + shard_file_name(1);
  const auto refused = [&](const Box& box, const std::string& rule) {
    EXPECT_THAT(
        [&] {
          CheckpointReader reader(path);
          read(reader, "large", box);
        },
        ThrowsMessage<CheckpointError>(AllOf(HasSubstr(file + ": is damaged"), says(rule))));
  };
  const Box whole = Box::whole({1500, 1000}), first{{{0, 100}, {0, 600}}};
  const uint64_t size = fs::file_size(file);
  ASSERT_GT(size, 3 * io::kBlockBytes);
  for (const uint64_t at : {io::kBlockBytes, 2 * io::kBlockBytes - 1, size - 1}) {
    flip(file, at);
    refused(whole, "bytes " + std::to_string(at / io::kBlockBytes * io::kBlockBytes) + " to ");
    CheckpointReader reader(path);
    EXPECT_EQ(read(reader, "large", first), numbers({1500, 1000}, first));
    EXPECT_THROW(verify(path), CheckpointError);
    EXPECT_NO_THROW(read(*std::make_unique<CheckpointReader>(path, false), "large", whole));
    flip(file, at);
  }
  // The header: its size, a name, an offset, the white space at its end.
  for (const uint64_t at : {0, 7, 9, 100, 200}) {
    flip(file, at);
    refused(first, "bytes 0 to 1048576 have CRC32C ");
    refused(Box{{{1400, 1500}, {0, 600}}}, "bytes 0 to 1048576");
    flip(file, at);
  }
  flip(file, io::kBlockBytes - 1);
  refused(first, "bytes 0 to 1048576");
  flip(file, io::kBlockBytes - 1);
  verify(path);
  // A block that was refused is not kept.
  CheckpointReader reader(path);
  flip(file, io::kBlockBytes + 1);
  const Box second{{{500, 501}, {0, 600}}};
  EXPECT_THROW(read(reader, "large", second), CheckpointError);
  EXPECT_THROW(read(reader, "large", second), CheckpointError);
  flip(file, io::kBlockBytes + 1);
  EXPECT_EQ(read(reader, "large", second), numbers({1500, 1000}, second));
}

TEST_F(Reader, BadFiles) {
  const auto name = shard_file_name(2);
  const auto refused = [&](const auto& damage, const std::string& rule) {
    const auto path = save_small();
    damage(path + "/");
    const auto matches = ThrowsMessage<CheckpointError>(AllOf(HasSubstr(path), says(rule)));
    EXPECT_THAT(
        [&] {
          CheckpointReader reader(path);
          read(reader, "w", Box::whole({4, 6}));
        },
        matches);
    EXPECT_THAT([&] { verify(path); }, matches);
  };
  using Path = const std::string&;
  refused([&](Path path) { fs::resize_file(path + name, 30); },
          name + ": has 30 bytes, its manifest says ");
  refused([&](Path path) { fs::resize_file(path + name, uint64_t{1} << 40); },
          name + ": has 1099511627776 bytes");
  refused([&](Path path) { fs::remove(path + name); }, name + ": No such file");
  refused(
      [&](Path path) {
        fs::rename(path + name, path + "x");
        fs::create_symlink("x", path + name);
      },
      name + " ... symbolic link");
  refused([&](Path path) { fs::remove(path + name), fs::create_directory(path + name); },
          name + " ... regular file");
  refused([&](Path path) { fs::remove(path + name), mkfifo((path + name).c_str(), 0600); },
          name + " ... regular file");
  refused(
      [&](Path path) {
        fs::rename(path + name, path + "x");
        fs::rename(path + shard_file_name(1), path + name);
        fs::rename(path + "x", path + shard_file_name(1));
      },
      shard_file_name(1) + ": is damaged");
  refused(
      [&](Path path) {
        fs::rename(path + "manifest.json", path + "x");
        fs::create_symlink("x", path + "manifest.json");
      },
      "manifest.json ... symbolic link");
  refused(
      [&](Path path) {
        fs::remove(path + "manifest.json"), fs::create_directory(path + "manifest.json");
      },
      "manifest.json ... regular file");
  refused([&](Path path) { fs::resize_file(path + "manifest.json", uint64_t{1} << 40); },
          "manifest.json ... 1099511627776 bytes ... at most");
  // After the manifest was read.
  const auto path = save_small();
  CheckpointReader reader(path);
  const auto size = fs::file_size(path + "/" + name);
  for (const auto other : {size - 1, size + 1}) {
    fs::resize_file(path + "/" + name, other);
    EXPECT_THAT(
        [&] {
          read(reader, "w", Box::whole({4, 6}));
        },
        ThrowsMessage<CheckpointError>(HasSubstr("its manifest says")));
  }
  fs::remove(path + "/" + name);
  EXPECT_THAT(
      [&] {
        read(reader, "w", Box::whole({4, 6}));
      },
      ThrowsMessage<SystemError>(HasSubstr(name)));
  fs::create_symlink(shard_file_name(1), path + "/" + name);
  EXPECT_THAT(
      [&] {
        read(reader, "w", Box::whole({4, 6}));
      },
      ThrowsMessage<CheckpointError>(says("symbolic link")));
}

// Files that are whole, but not what the manifest says.
TEST_F(Reader, OtherContents) {
  const auto refused = [&](const std::vector<ShardSlice>& slices, const std::string& rule) {
    const auto folder = begin_checkpoint(dir_, 1);
    const std::vector<ShardSlice> declared = {{"w", "I32", {4}, {{{0, 4}}}}};
    const auto record = write_numbers(folder, "f", slices);
    CheckpointReader reader(commit_checkpoint(dir_, shard_manifest(1, "f", record, declared)));
    EXPECT_THAT([&] { read(reader, "w", Box::whole({4})); },
                ThrowsMessage<CheckpointError>(HasSubstr("/f: " + rule)));
  };
  refused({{"v", "I32", {4}, {{{0, 4}}}}}, "has no tensor w");
  refused({{"w", "F32", {4}, {{{0, 4}}}}}, "tensor w is F32 (4), the manifest says I32 (4)");
  refused({{"w", "I32", {4}, {{{0, 3}}}}}, "tensor w is I32 (3), the manifest says I32 (4)");

  const auto folder = begin_checkpoint(dir_, 2);
  const std::vector<ShardSlice> declared = {{"w", "I32", {4}, {{{0, 4}}}}};
  test::write_file(folder + "/f", "no header");
  CheckpointReader reader(commit_checkpoint(
      dir_, shard_manifest(2, "f", test_support::record_of(folder + "/f"), declared)));
  EXPECT_THAT([&] { read(reader, "w", Box::whole({4})); },
              ThrowsMessage<CheckpointError>(HasSubstr("/f: a header of ")));
}

TEST_F(Reader, BadRequests) {
  CheckpointReader reader(save_small());
  std::vector<std::byte> bytes(96);
  const auto refused = [&](const std::string& name, const Box& box, size_t size, const char* rule) {
    EXPECT_THAT([&] { reader.read(name, box, std::span(bytes).first(size)); },
                ThrowsMessage<ConfigError>(AllOf(HasSubstr(reader.path()), says(rule))));
  };
  refused("x", Box::whole({}), 4, "has no tensor x");
  refused("w", Box{{{0, 4}, {0, 7}}}, 96, "tensor w (4, 6): 96 bytes for [0:4, 0:7] of it");
  refused("w", Box{{{0, 4}}}, 96, "96 bytes for [0:4]");
  refused("w", Box::whole({4, 6}), 95, "95 bytes for [0:4, 0:6]");
}

// More files than a process may have open.
TEST_F(Reader, ManyFiles) {
  std::vector<std::vector<ShardSlice>> files;
  for (int64_t i = 0; i < 60; ++i) files.push_back({{"w", "I32", {60}, {{{i, i + 1}}}}});
  CheckpointReader reader(save_numbers(dir_, 1, files));
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit few{40, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
  const auto values = read(reader, "w", Box::whole({60}));
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_EQ(values, numbers({60}, Box::whole({60})));
}

}  // namespace
}  // namespace lockstep::formats
