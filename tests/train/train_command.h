// SPDX-License-Identifier: Apache-2.0
// A small training run of the command, for tests of what its users meet.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "tests/support/sampling.h"
#include "tests/support/says.h"
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

// What `lockstep train` does with these arguments, with threads of this process as ranks: a process
// takes a second to load libtorch. Throws where the command would end with an error.
void train_in_threads(const Words& arguments);

// A folder with text, and a small training run in it.
class Train : public testing::Test {
 protected:
  Train() { write_file(data(), some_text()); }

  std::string data() const { return folder_.path() + "/text.txt"; }
  std::string path(const std::string& name) const { return folder_.path() + "/" + name; }

  // lockstep train on the data; later options win. One thread: two wait for each other where the
  // cores are taken.
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
                "--train.threads",
                "1",
                "--checkpoint.dir",
                path("checkpoints"),
                "--metrics.file",
                path("metrics.jsonl"),
                "--run.dir",
                ""};
    words.insert(words.end(), options.begin(), options.end());
    return words;
  }
  Result run(const Words& options) const { return lockstep_command(command(options)); }
  // One that must succeed, in folders of its own; its steps. `make check-all`, and where there is a
  // GPU, has processes as ranks.
  std::vector<json> steps(const std::string& name, const Words& options) const {
    if (kHasGpu || tests_all()) return steps_of_processes(name, options);
    Words arguments = command(in_folders(name) + options);
    arguments.erase(arguments.begin());  // the verb
    EXPECT_NO_THROW(train_in_threads(arguments));
    return read_steps(path(name + ".jsonl"));
  }
  // The same, but it throws where the command would end with an error.
  void steps_or_throw(const std::string& name, const Words& options) const {
    // Threads cannot share a GPU.
    const Words arguments = command(in_folders(name) + Words{"--train.device", "cpu"} + options);
    train_in_threads(Words(arguments.begin() + 1, arguments.end()));
  }
  std::vector<json> steps_of_processes(const std::string& name, const Words& options) const {
    const Result result = run(in_folders(name) + options);
    EXPECT_EQ(result.code, 0) << result.out << result.err;
    return read_steps(path(name + ".jsonl"));
  }
  // Losses and norms of one that must follow another.
  void expect_follows(const std::string& name, const Words& options,
                      const std::vector<json>& other) const {
    SCOPED_TRACE(name);
    const auto found = steps(name, options);
    expect_close(losses(found), losses(other), 1e-5);
    for (size_t i = 0; i < found.size(); ++i) {
      const double norm = other[i]["grad_norm"];
      EXPECT_NEAR(found[i]["grad_norm"].get<double>(), norm, 1e-5 * norm) << i;
    }
  }
  // One that goes on in another layout every two steps; all its losses.
  std::vector<double> moving(const Words& options, const std::vector<Words>& layouts) const {
    std::vector<double> found;
    int step = 0;
    for (const Words& layout : layouts) {
      step += 2;
      found = losses(steps("moving", options + layout +
                                         Words{"--train.steps", std::to_string(step),
                                               "--checkpoint.resume", "auto"}));
    }
    return found;
  }
  void expect_refused(const Words& options, const std::string& message) const {
    const Result result = run(options);
    EXPECT_EQ(result.code, 2) << message;
    EXPECT_THAT(result.err, says(message));
    EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
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

 private:
#ifdef LOCKSTEP_TEST_GPU
  static constexpr bool kHasGpu = true;
#else
  static constexpr bool kHasGpu = false;
#endif
  Words in_folders(const std::string& name) const {
    return {"--checkpoint.dir", path(name), "--metrics.file", path(name + ".jsonl")};
  }
};

}  // namespace lockstep::test
