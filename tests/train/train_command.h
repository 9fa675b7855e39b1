// A small training run of the command, for tests of what its users meet.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "tests/support/subprocess.h"

namespace lockstep::test {

using nlohmann::json;
using Words = std::vector<std::string>;

inline Words operator+(Words a, const Words& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

// Text with something to learn in it.
inline std::string some_text(int lines = 400) {
  std::string text;
  for (int i = 0; i < lines; ++i) {
    text += "int f" + std::to_string(i * i % 97) + "(int x) { return x + " +
            std::to_string(i % 13) + "; }\n";
  }
  return text;
}

// A folder with text, and a small training run in it.
class Train : public testing::Test {
 protected:
  Train() { write_file(data(), some_text()); }

  std::string data() const { return folder_.path() + "/text.txt"; }
  std::string path(const std::string& name) const { return folder_.path() + "/" + name; }

  // lockstep train on the data; later options win.
  Words command(const Words& options) const {
    Words words{"train",
                "--data.path",
                data(),
                "--model.layers",
                "2",
                "--model.hidden",
                "32",
                "--model.heads",
                "2",
                "--train.seq_len",
                "32",
                "--train.micro_batch",
                "2",
                "--train.global_batch",
                "8",
                "--train.steps",
                "20",
                "--optim.warmup",
                "2",
                "--optim.lr",
                "0.01",
                "--comm.timeout",
                "120",
                "--checkpoint.dir",
                path("checkpoints"),
                "--metrics.file",
                path("metrics.jsonl")};
    words.insert(words.end(), options.begin(), options.end());
    return words;
  }
  Result run(const Words& options) const { return lockstep_command(command(options)); }
  // One that must succeed, in folders of its own; its steps.
  std::vector<json> steps(const std::string& name, const Words& options) const {
    Words words{"--checkpoint.dir", path(name), "--metrics.file", path(name + ".jsonl")};
    words.insert(words.end(), options.begin(), options.end());
    const Result result = run(words);
    EXPECT_EQ(result.code, 0) << result.out << result.err;
    return read_steps(path(name + ".jsonl"));
  }
  static std::vector<json> read_steps(const std::string& path) {
    std::vector<json> lines;
    std::istringstream text(read_file(path));
    for (std::string line; std::getline(text, line);) {
      const json object = json::parse(line);
      if (object.contains("loss")) lines.push_back(object);
    }
    return lines;
  }

  const TempDir folder_;
};

inline std::vector<double> losses(const std::vector<json>& steps) {
  std::vector<double> values;
  for (const json& step : steps) values.push_back(step["loss"]);
  return values;
}

inline void expect_close(const std::vector<double>& a, const std::vector<double>& b,
                         double relative) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_NEAR(a[i], b[i], relative * std::abs(b[i])) << i;
}

}  // namespace lockstep::test
