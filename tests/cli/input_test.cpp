// SPDX-License-Identifier: Apache-2.0
// Files that are not what they should be, under every name that a command reads: one line that
// names the file, and never a crash or a wait.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "lockstep/core/fd.h"
#include "tests/cli/checkpoint/arrays.h"

namespace lockstep::test {
namespace {

using ::testing::HasSubstr;

struct Read {
  std::string file;
  std::vector<std::string> command;
  // JSON in which the text is a value that the reader looks at; empty: the file is not JSON.
  std::string before = {}, after = {};
};

std::string nested(int depth) {
  const auto levels = static_cast<size_t>(depth);
  return std::string(levels, '[') + std::string(levels, ']');
}

class Input : public CheckpointConvert {
 protected:
  // Folders with all that is read, sound.
  void make_all() const {
    fs::remove_all(path("all"));
    fs::create_directories(path("all/trace"));
    write_file(path("all/text.txt"), std::string(1000, 'a'));
    write_hf(path("all/hf"), gpt_.model, gpt2_arrays(model_values(gpt_.model), true, ""));
    save_model(path("all/run"), gpt_, {});
  }
  std::vector<Read> reads() const {
    const std::string hf = path("all/hf"), text = path("all/text.txt");
    const std::vector<std::string> import{"checkpoint", "import", hf, path("all/imported")};
    const std::string step = path("all/run/step-00000007");
    return {
        {hf + "/config.json", import, R"({"model_type": )", "}"},
        {hf + "/config.json", import, R"({"model_type": "gpt2", "n_embd": )", "}"},
        {hf + "/model.safetensors", import},
        {hf + "/model.safetensors.index.json", import, R"({"weight_map": {"a": )", "}}"},
        {hf + "/tokenizer.json",
         {"data", "pack", "--input", text, "--output", path("all/x.bin"), "--tokenizer",
          hf + "/tokenizer.json"},
         R"({"normalizer": )",
         "}"},
        {hf + "/tokenizer.json",
         {"data", "pack", "--input", text, "--output", path("all/x.bin"), "--tokenizer",
          hf + "/tokenizer.json"},
         R"({"pre_tokenizer": )",
         "}"},
        {step + "/manifest.json", {"checkpoint", "inspect", step}, R"({"config": )", "}"},
        {step + "/manifest.json", {"checkpoint", "verify", step}, R"({"format": )", "}"},
        {path("all/c.json"),
         {"train", "--config", path("all/c.json")},
         R"({"train": {"steps": )",
         "}}"},
        {path("all/c.json"), {"plan", "memory", "--config", path("all/c.json")}, R"({"a": )", "}"},
        {path("all/s.csv"), {"schedule", "--kind", path("all/s.csv")}},
        {path("all/metrics"),
         {"train", "--data.path", text, "--train.seq_len", "16", "--checkpoint.dir",
          path("all/out"), "--metrics.file", path("all/metrics"), "--run.dir", ""}},
    };
  }
  static void expect_refused(const Read& read, const std::string& what) {
    SCOPED_TRACE(testing::Message()
                 << what << " as " << read.file << " for " << testing::PrintToString(read.command));
    const Result result = lockstep_command(read.command);
    EXPECT_TRUE(result.code == 1 || result.code == 2) << result.code;
    EXPECT_THAT(result.err, HasSubstr(read.file));
    EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
    EXPECT_LT(result.err.size(), 1000U);
  }
};

TEST_F(Input, DeepNestingIsRefused) {
  for (const Read& read : reads()) {
    if (read.before.empty()) continue;
    make_all();
    if (read.file.ends_with(".index.json")) fs::remove(path("all/hf/model.safetensors"));
    for (const int depth : {33, 100'000}) {
      for (const bool whole : {false, true}) {
        write_file(read.file, whole ? nested(depth) : read.before + nested(depth) + read.after);
        expect_refused(read, std::to_string(depth) + " levels");
      }
    }
    // Not closed: what is cut off.
    write_file(read.file, read.before + std::string(100'000, '['));
    expect_refused(read, "levels that do not end");
  }
}

TEST_F(Input, OnlyRegularFilesAreRead) {
  const std::vector<std::pair<std::string, std::function<void(const std::string&)>>> kinds{
      {"a pipe", [](const std::string& path) { ASSERT_EQ(mkfifo(path.c_str(), 0600), 0); }},
      {"a folder", [](const std::string& path) { fs::create_directory(path); }},
      {"/dev/zero", [](const std::string& path) { fs::create_symlink("/dev/zero", path); }},
      {"a socket", [](const std::string& path) {
         // Names of sockets are short.
         const Fd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
         const TempDir folder;
         sockaddr_un address{};
         address.sun_family = AF_UNIX;
         const std::string name = folder.path() + "/s";
         ASSERT_LT(name.size(), sizeof address.sun_path);
         std::copy(name.begin(), name.end(), address.sun_path);
         ASSERT_EQ(bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
         fs::rename(name, path);
       }}};
  std::string before;
  for (const Read& read : reads()) {
    if (read.file == before) continue;
    before = read.file;
    for (const auto& [name, make] : kinds) {
      make_all();
      if (read.file.ends_with(".index.json")) fs::remove(path("all/hf/model.safetensors"));
      fs::remove(read.file);
      make(read.file);
      expect_refused(read, name);
    }
  }
}

}  // namespace
}  // namespace lockstep::test
