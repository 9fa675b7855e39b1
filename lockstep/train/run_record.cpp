// SPDX-License-Identifier: Apache-2.0
#include "lockstep/train/run_record.h"

#include <ATen/ATen.h>
#include <torch/version.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <vector>

#include "lockstep/comm/control/rank_texts.h"
#include "lockstep/config/run_folder.h"
#include "lockstep/config/run_tokenizer.h"
#include "lockstep/core/clock.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/rank_env.h"
#include "lockstep/core/version.h"
#include "lockstep/memory/meter.h"
#include "lockstep/train/device/device.h"

namespace lockstep::train {
namespace {

using RecordJson = nlohmann::ordered_json;

// Of the repository that the run was started in, with "-dirty" where files of it were changed;
// empty without one, and without git.
std::string git_commit() {
  constexpr const char* kCommand =
      "GIT_OPTIONAL_LOCKS=0 git describe --always --dirty --abbrev=40 --exclude='*' 2>/dev/null";
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> pipe(popen(kCommand, "re"), pclose);
  if (!pipe) return {};
  std::array<char, 256> text{};
  if (std::fgets(text.data(), text.size(), pipe.get()) == nullptr) return {};
  const std::string line = text.data();
  return line.substr(0, line.find('\n'));
}

std::vector<std::string> command_line() {
  std::ifstream file("/proc/self/cmdline");
  std::vector<std::string> words;
  for (std::string word; std::getline(file, word, '\0');) words.push_back(word);
  return words;
}

// "x86_64 AMD EPYC 7763"; ARM's kernel does not name the model.
std::string cpu_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(": ");
    if (line.starts_with("model name") && colon < line.size()) return line.substr(colon + 2);
  }
  return "cpu";
}

// What this rank's threads reach in a product of matrices in float32, while the other ranks of the
// host do the same: what a model's speed is compared with.
double cpu_gflops() {
  constexpr int64_t kSize = 384;
  constexpr int kTries = 6;
  at::Tensor a = at::ones({kSize, kSize}), b = at::ones({kSize, kSize});
  at::Tensor c = at::mm(a, b);
  double best = 0;
  for (int i = 0; i < kTries; ++i) {
    const auto start = Clock::now();
    at::mm_out(c, a, b);
    best = std::max(best, 2e-9 * kSize * kSize * kSize / seconds_since(start));
  }
  a = b = c = at::Tensor();
  if (memory::Meter::is_installed())
    memory::Meter::reset_peak();  // these are no tensors of the run
  return std::round(best * 10) / 10;
}

std::string now_text() {
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  gmtime_r(&now, &utc);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &utc);
  return text;
}

void write_environment(const std::string& folder, const comm::Group& world,
                       const std::vector<std::string>& ranks) {
  RecordJson line{{"started", now_text()},
                  {"lockstep", LOCKSTEP_VERSION},
                  {"libtorch", TORCH_VERSION},
                  {"compiler", __VERSION__},
                  {"command", command_line()},
                  {"directory", std::filesystem::current_path().string()},
                  {"commit", RecordJson()},
                  {"world_size", world.size()},
                  {"backend", world.size() > 1 ? std::string(world.backend()) : "none"},
                  {"launcher", std::string(name_of(RankEnv::detect().launcher))},
                  {"ranks", RecordJson::array()}};
  if (const std::string commit = git_commit(); !commit.empty()) line["commit"] = commit;
  for (const std::string& rank : ranks) line["ranks"].push_back(RecordJson::parse(rank));
  const std::string path = folder + "/environment.jsonl";
  std::ofstream file(path, std::ios::app);
  // Names of files and hosts may have bytes that are not UTF-8.
  file << line.dump(-1, ' ', false, RecordJson::error_handler_t::replace) << std::endl;
  if (!file) throw ConfigError(format("run.dir: cannot write {}; choose another place", path));
}

}  // namespace

RunRecord record_start(const config::TrainConfig& config, const comm::Group& world,
                       c10::Device device) {
  const RecordJson mine{{"host", host_name()},
                        {"pid", getpid()},
                        {"device", device.str()},
                        {"name", device.is_cuda() ? cuda_name(device) : cpu_name()},
                        {"gflops", device.is_cuda() ? RecordJson() : RecordJson(cpu_gflops())}};
  const auto ranks =
      comm::gather_texts(mine.dump(-1, ' ', false, RecordJson::error_handler_t::replace), world);
  const auto from_rank_0 = [&](const std::function<std::string()>& function) {
    return comm::run_on_all_ranks(
        "run.dir", world, [&] { return world.rank() == 0 ? function() : std::string(); })[0];
  };
  RunRecord record;
  record.config = from_rank_0([&] {
    if (config.run.dir.empty()) return config::to_json(config);
    write_environment(config.run.dir, world, ranks);
    config::TrainConfig kept = config::read_next_run_config(config.run.dir);
    kept.model = config.model;
    return config::to_json(kept);
  });
  record.tokenizer = from_rank_0([&] {
    const std::string crc = config::tokenizer_crc(config.data.tokenizer);
    return crc.empty() ? "" : format(R"({{"crc32c":"{}"}})", crc);
  });
  return record;
}

void commit_start(const config::TrainConfig& config, const comm::Group& world) {
  comm::run_on_all_ranks("run.dir", world, [&]() -> std::string {
    if (world.rank() == 0 && !config.run.dir.empty()) config::commit_run_config(config.run.dir);
    return {};
  });
}

}  // namespace lockstep::train
