// SPDX-License-Identifier: Apache-2.0
#include "lockstep/data/text_files.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>

#include "lockstep/core/error.h"
#include "tests/support/says.h"
#include "tests/support/subprocess.h"

namespace lockstep::data {
namespace {

using test::says;
using test::TempDir;
using test::write_file;
using testing::ElementsAre;
using testing::ThrowsMessage;
using testing::UnorderedElementsAre;
namespace fs = std::filesystem;

class TextFilesTest : public testing::Test {
 protected:
  std::string path(const std::string& name) const { return dir_.path() + "/" + name; }

  void write(const std::string& name, const std::string& text = "text") const {
    fs::create_directories(fs::path(path(name)).parent_path());
    write_file(path(name), text);
  }

  // The files found, relative to the test's folder.
  std::vector<std::string> found(const std::string& data_path) const {
    std::vector<std::string> names = find_data_files(data_path).paths;
    for (std::string& name : names) name = fs::path(name).lexically_relative(dir_.path());
    return names;
  }

  void refused(const std::string& data_path, const char* rule) const {
    EXPECT_THAT([&] { find_data_files(data_path); }, ThrowsMessage<ConfigError>(says(rule)));
  }

  TempDir dir_;
};

TEST_F(TextFilesTest, AFileIsItself) {
  write("a.txt");
  EXPECT_THAT(found(path("a.txt")), ElementsAre("a.txt"));
  refused(path("b.txt"), "No such file or directory; give a file, a folder, a pattern");
  write("empty", "");
  refused(path("empty"), "is empty");
  write("zero", std::string("a\0b", 3));
  refused(path("zero"), "is not text ... .bin");
  refused("/dev/null", "neither ... file ... folder");
  refused("", "is empty; give a file");
}

// Records of another program, which would be trained with all brackets and names.
TEST_F(TextFilesTest, AListOfObjectsIsNotText) {
  const std::string list = "\n [\n  {\"prompt\": \"a\", \"completion\": \"b\"}\n]\n";
  write("f/tune.json", list);
  refused(path("f/tune.json"), "f/tune.json ... .jsonl");
  refused(path("f/tune.json") + "," + path("f/tune.json"), "f/tune.json ... .jsonl");
  // Text of a folder, and other text.
  EXPECT_THAT(found(path("f")), ElementsAre("f/tune.json"));
  write("tune.txt", list);
  EXPECT_THAT(found(path("tune.txt")), ElementsAre("tune.txt"));
  for (const char* text : {"[1, 2]", "{\"a\": [{}]}", "[", "  ", "text"}) {
    write("other.json", text);
    EXPECT_THAT(found(path("other.json")), ElementsAre("other.json")) << text;
  }
}

TEST_F(TextFilesTest, AFolderIsAllBelowItThatIsText) {
  for (const char* name : {"f/a", "f/sub/b", "f/sub/deep/c", "f/.hidden", "f/.git/d"}) write(name);
  write("f/empty", "");
  write("f/zero", std::string("a\0b", 3));
  write("f/late_zero", std::string(8192, 'a') + std::string(1, '\0'));
  write("f/tokens.bin", std::string("\1\0\2\0", 4));
  write("f/tokens.idx", std::string("\1\0\2\0", 4));
  fs::create_symlink(path("f/gone"), path("f/dangling"));
  fs::create_directory_symlink(path("f"), path("f/sub/loop"));
  const DataFiles files = find_data_files(path("f"));
  EXPECT_EQ(files.unreadable, 1);
  EXPECT_EQ(files.binary, 1);
  EXPECT_THAT(found(path("f")), UnorderedElementsAre("f/a", "f/sub/b", "f/sub/deep/c",
                                                     "f/late_zero", "f/tokens.bin"));
}

TEST_F(TextFilesTest, EachFileOnce) {
  write("f/a");
  write("other/b");
  fs::create_symlink(path("f/a"), path("f/link"));
  fs::create_hard_link(path("f/a"), path("f/hard"));
  fs::create_symlink(path("other/b"), path("f/outside"));
  EXPECT_EQ(found(path("f")).size(), 2u);
  EXPECT_THAT(found(path("other/b") + "," + path("f/a") + "," + path("f")),
              ElementsAre("other/b", "f/a"));
}

TEST_F(TextFilesTest, ListsKeepTheirOrder) {
  for (const char* name : {"a", "b", "c", "with,comma"}) write(name);
  EXPECT_THAT(found(path("c") + "," + path("a") + "," + path("b")), ElementsAre("c", "a", "b"));
  EXPECT_THAT(found(path("c") + ",," + path("a") + ","), ElementsAre("c", "a"));
  EXPECT_THAT(found(path("with,comma")), ElementsAre("with,comma"));
  refused(path("a") + "," + path("d"), "/d: No such file");
  refused(",", "no file ... read");
}

TEST_F(TextFilesTest, Patterns) {
  for (const char* name : {"f/a.txt", "f/b.txt", "f/c.md", "f/[x].txt", "g/d.txt"}) write(name);
  EXPECT_THAT(found(path("f/*.txt")), UnorderedElementsAre("f/a.txt", "f/b.txt", "f/[x].txt"));
  EXPECT_THAT(found(path("?/[ad].txt")), UnorderedElementsAre("f/a.txt", "g/d.txt"));
  EXPECT_THAT(found(path("f/[x].txt")), ElementsAre("f/[x].txt"));  // a file of that name
  EXPECT_EQ(found(path("*")).size(), 5u);                           // folders that fit are searched
  refused(path("f/*.pdf"), "no file ... pattern");
}

TEST_F(TextFilesTest, NothingUsable) {
  fs::create_directory(path("f"));
  refused(path("f"), "no file ... read");
  write("f/zero", std::string("a\0b", 3));
  refused(path("f"), "1 binary and 0 unreadable");
}

// The order is part of what a run means: these may not change between releases or machines.
TEST_F(TextFilesTest, TheOrderIsFixed) {
  for (const char* name : {"f/a", "f/b", "f/c", "f/d", "f/sub/a"}) write(name);
  const std::vector<std::string> expected{"f/sub/a", "f/c", "f/a", "f/b", "f/d"};
  EXPECT_EQ(found(path("f")), expected);
  EXPECT_EQ(found(path("f/")), expected);
  EXPECT_EQ(found(path("f/*")), expected);
  fs::rename(path("f"), path("moved"));
  auto moved = expected;
  for (std::string& name : moved) name.replace(0, 1, "moved");
  EXPECT_EQ(found(path("moved")), moved);
}

// Files of two kinds, told apart by their names: both halves of the order must have both.
TEST_F(TextFilesTest, AnyStretchIsAFairSample) {
  for (int i = 0; i < 200; ++i) write((i < 100 ? "f/a" : "f/z") + std::to_string(i));
  const auto names = found(path("f"));
  ASSERT_EQ(names.size(), 200u);
  for (const size_t begin : {size_t{0}, size_t{100}, size_t{150}}) {
    const auto first = names.begin() + static_cast<ptrdiff_t>(begin);
    const auto of_a =
        std::count_if(first, first + 50, [](const auto& name) { return name.starts_with("f/a"); });
    EXPECT_GT(of_a, 13);
    EXPECT_LT(of_a, 37);
  }
}

}  // namespace
}  // namespace lockstep::data
