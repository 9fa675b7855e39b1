// SPDX-License-Identifier: Apache-2.0
#include "lockstep/train/observe/metrics.h"

#include <sys/resource.h>

#include <chrono>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/io/json.h"
#include "lockstep/train/device/device.h"

namespace lockstep::train {
namespace {

using Json = nlohmann::ordered_json;

// Beyond these the times of all ranks are in every 16th line only.
constexpr size_t kRanksInEachLine = 64;
constexpr int64_t kSeldom = 16;

Json number(double value) { return std::isfinite(value) ? Json(value) : Json(); }
// Microseconds are enough.
Json rounded(double value) { return number(std::round(value * 1e3) / 1e3); }

// Copies the lines of steps up to `last_step`; a line that was cut off by a crash ends them.
void copy_lines(const std::string& path, int64_t last_step, std::ofstream& to) {
  std::ifstream old(path);
  for (std::string line; std::getline(old, line);) {
    const auto parsed = io::parse_json_line(line);
    if (!parsed.is_object() || !parsed.contains("step") || !parsed["step"].is_number_integer()) {
      break;
    }
    if (parsed["step"].get<int64_t>() <= last_step) to << line << "\n";
  }
}

}  // namespace

MetricsFile::MetricsFile(const std::string& path, int64_t last_step) {
  if (path.empty()) return;
  // It would be replaced, whatever it is.
  if (std::filesystem::exists(path) && !std::filesystem::is_regular_file(path)) {
    throw ConfigError(format("metrics.file: {} is not a regular file; choose another place", path));
  }
  const auto folder = std::filesystem::path(path).parent_path();
  std::error_code failure;
  if (!folder.empty()) std::filesystem::create_directories(folder, failure);
  // In a new file, which takes the old one's place when it is complete.
  const std::string temporary = path + ".tmp";
  std::ofstream file(temporary, std::ios::trunc);
  if (last_step > 0) copy_lines(path, last_step, file);
  file.close();
  if (file) std::filesystem::rename(temporary, path, failure);
  if (!file || failure) {
    throw ConfigError(format("metrics.file: cannot write {}; choose another place", path));
  }
  file_ = io::LineFile(path);
}

void MetricsFile::write(const StepMetrics& metrics) {
  if (!file_.is_open()) return;
  const StepSplit& split = metrics.split;
  Json object{{"step", metrics.step},
              {"time", rounded(metrics.time)},
              {"loss", number(metrics.loss)},
              {"grad_norm", number(metrics.grad_norm)},
              {"lr", metrics.lr},
              {"tokens", metrics.tokens},
              {"tokens_per_s", rounded(metrics.tokens_per_s)},
              {"step_ms", rounded(metrics.step_ms)},
              {"comm_ms", rounded(metrics.comm_ms)},
              {"peak_bytes", metrics.peak_bytes},
              {"split",
               {{"compute_ms", rounded(split.compute_ms)},
                {"communication_ms", rounded(split.communication_ms)},
                {"bubble_ms", rounded(split.bubble_ms)},
                {"optimizer_ms", rounded(split.optimizer_ms)},
                {"data_ms", rounded(split.data_ms)},
                {"checkpoint_ms", rounded(split.checkpoint_ms)},
                {"stall_ms", rounded(split.stall_ms)}}}};
  if (const size_t ranks = metrics.busy_ms.size();
      ranks > 1 && (ranks <= kRanksInEachLine || metrics.step % kSeldom == 0)) {
    for (const double busy : metrics.busy_ms) object["busy_ms"].push_back(rounded(busy));
    object["rank_peak_bytes"] = metrics.rank_peak_bytes;
  }
  if (metrics.skipped) object["skipped"] = true;
  file_.write(object.dump());
}

void MetricsFile::write_evaluation(int64_t step, double loss, double time) {
  if (!file_.is_open()) return;
  file_.write(
      Json{{"step", step}, {"time", rounded(time)}, {"validation_loss", number(loss)}}.dump());
}

double seconds_since_1970() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

int64_t peak_bytes(c10::Device device) {
  if (device.is_cuda()) return peak_cuda_bytes(device);
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return int64_t{usage.ru_maxrss} * 1024;
}

}  // namespace lockstep::train
