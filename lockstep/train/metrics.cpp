// SPDX-License-Identifier: Apache-2.0
#include "lockstep/train/metrics.h"

#include <sys/resource.h>

#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/input_file.h"
#include "lockstep/io/json.h"
#include "lockstep/train/device/device.h"

namespace lockstep::train {
namespace {

using Json = nlohmann::ordered_json;

constexpr uint64_t kMostBytes = uint64_t{4} << 30;

Json number(double value) { return std::isfinite(value) ? Json(value) : Json(); }

// The lines of steps up to `last_step`; a line that was cut off by a crash ends them.
std::vector<std::string> kept_lines(const std::string& path, int64_t last_step) {
  std::vector<std::string> kept;
  if (!std::filesystem::exists(path)) return kept;
  std::istringstream old(read_text(path, kMostBytes));
  for (std::string line; std::getline(old, line);) {
    const auto parsed = io::parse_json_line(line);
    if (!parsed.is_object() || !parsed.contains("step") || !parsed["step"].is_number_integer()) {
      break;
    }
    if (parsed["step"].get<int64_t>() <= last_step) kept.push_back(line);
  }
  return kept;
}

}  // namespace

MetricsFile::MetricsFile(const std::string& path, int64_t last_step) {
  if (path.empty()) return;
  // It would be replaced, whatever it is.
  if (std::filesystem::exists(path) && !std::filesystem::is_regular_file(path)) {
    throw ConfigError(format("metrics.file: {} is not a regular file; choose another place", path));
  }
  const auto kept = last_step > 0 ? kept_lines(path, last_step) : std::vector<std::string>{};
  const auto folder = std::filesystem::path(path).parent_path();
  std::error_code failure;
  if (!folder.empty()) std::filesystem::create_directories(folder, failure);
  // In a new file, which takes the old one's place when it is complete.
  const std::string temporary = path + ".tmp";
  file_.open(temporary, std::ios::trunc);
  for (const std::string& text : kept) line(text);
  if (file_) std::filesystem::rename(temporary, path, failure);
  if (!file_ || failure) {
    throw ConfigError(format("metrics.file: cannot write {}; choose another place", path));
  }
}

void MetricsFile::line(const std::string& text) {
  if (file_.is_open()) file_ << text << "\n" << std::flush;
}

void MetricsFile::write(const StepMetrics& metrics) {
  Json object{{"step", metrics.step},
              {"loss", number(metrics.loss)},
              {"grad_norm", number(metrics.grad_norm)},
              {"lr", metrics.lr},
              {"tokens_per_s", metrics.tokens_per_s},
              {"step_ms", metrics.step_ms},
              {"comm_ms", metrics.comm_ms},
              {"peak_bytes", metrics.peak_bytes}};
  if (metrics.skipped) object["skipped"] = true;
  line(object.dump());
}

void MetricsFile::write_evaluation(int64_t step, double loss) {
  line(Json{{"step", step}, {"validation_loss", number(loss)}}.dump());
}

int64_t peak_bytes(c10::Device device) {
  if (device.is_cuda()) return peak_cuda_bytes(device);
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return int64_t{usage.ru_maxrss} * 1024;
}

}  // namespace lockstep::train
