// SPDX-License-Identifier: Apache-2.0
#include "lockstep/train/device/device.h"

#include <algorithm>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/log.h"
#include "lockstep/nn/float8/float8.h"
#include "lockstep/nn/kernels/can_multiply.h"
#include "lockstep/parallel/data/ddp.h"

namespace lockstep::train {

namespace {

// On a CPU, with a layer of the model's width, or one that the slowest computes in no time.
void warn_if_slow(int64_t hidden, c10::Device device) {
  constexpr double kSeconds = 0.05;
  const int64_t width = std::min<int64_t>(hidden, 512);
  const std::string slow =
      nn::slower_than_float32(nn::layer_rate(width, at::kBFloat16, device, kSeconds),
                              nn::layer_rate(width, at::kFloat, device, kSeconds));
  if (slow.empty()) return;
  log::warn(
      format("train.dtype is bfloat16, in which a layer {} wide takes {} on {}; "
             "train.dtype float32 trains faster here",
             width, slow, device.str()));
}

}  // namespace

c10::Device choose_device(const config::TrainConfig& config, const comm::Group& group) {
  const auto wanted = config.train.device;
  const c10::Device found =
      wanted == config::DeviceKind::cpu ? c10::Device(at::kCPU) : parallel::detected_device(group);
  if (wanted == config::DeviceKind::cuda && !found.is_cuda()) {
    throw ConfigError(
        "train.device is cuda, but this machine has none that libtorch can use; "
        "train.device cpu, or auto, takes the CPU");
  }
  make_current(found);
  if (config.train.type() == config::Precision::bfloat16 &&
      !nn::can_multiply(at::kBFloat16, found)) {
    throw ConfigError(format(
        "train.dtype is bfloat16, but this libtorch cannot multiply bfloat16 matrices on {}; "
        "use train.dtype float32",
        found.str()));
  }
  if (config.train.type() == config::Precision::bfloat16 && found.is_cpu() && group.rank() == 0) {
    warn_if_slow(config.model.hidden, found);
  }
  if (config.train.is_fp8()) {
    const std::string missing = nn::float8_missing(found);
    if (!missing.empty()) {
      throw ConfigError(format(
          "train.precision is fp8, but {} cannot compute it: {}; use train.precision bfloat16",
          found.str(), missing));
    }
    if (found.is_cpu() && group.rank() == 0)
      log::warn("train.precision is fp8, which the CPU computes in software, slower than float32");
  }
  return found;
}

}  // namespace lockstep::train
