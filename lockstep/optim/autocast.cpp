// SPDX-License-Identifier: Apache-2.0
#include "lockstep/optim/autocast.h"

#include <ATen/autocast_mode.h>
#include <torch/version.h>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::optim {

// torch 2.4 made one function out of one for each device, and allows float16 on the CPU.
#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 4)

constexpr bool kHalfOnCpu = true;

AutocastOptions current_autocast(at::DeviceType device) {
  return {.device = device,
          .dtype = at::autocast::get_autocast_dtype(device),
          .enabled = at::autocast::is_autocast_enabled(device)};
}

static void apply(const AutocastOptions& options) {
  at::autocast::set_autocast_dtype(options.device, options.dtype);
  at::autocast::set_autocast_enabled(options.device, options.enabled);
}

#else

constexpr bool kHalfOnCpu = false;

AutocastOptions current_autocast(at::DeviceType device) {
  if (device == at::kCPU) {
    return {.device = device,
            .dtype = at::autocast::get_autocast_cpu_dtype(),
            .enabled = at::autocast::is_cpu_enabled()};
  }
  return {.device = device,
          .dtype = at::autocast::get_autocast_gpu_dtype(),
          .enabled = at::autocast::is_enabled()};
}

static void apply(const AutocastOptions& options) {
  if (options.device == at::kCPU) {
    at::autocast::set_autocast_cpu_dtype(options.dtype);
    at::autocast::set_cpu_enabled(options.enabled);
  } else {
    at::autocast::set_autocast_gpu_dtype(options.dtype);
    at::autocast::set_enabled(options.enabled);
  }
}

#endif

namespace {

const AutocastOptions& checked(const AutocastOptions& options) {
  if (options.device != at::kCPU && options.device != at::kCUDA) {
    throw ConfigError(format("[autocast] device is {}, must be cpu or cuda",
                             c10::DeviceTypeName(options.device, true)));
  }
  const bool half = options.dtype == at::kHalf && (kHalfOnCpu || options.device != at::kCPU);
  if (options.dtype != at::kBFloat16 && !half) {
    throw ConfigError(format("[autocast] dtype is {}, must be bfloat16 or float16{}",
                             c10::toString(options.dtype),
                             kHalfOnCpu ? "" : ", on cpu bfloat16 with this libtorch"));
  }
  return options;
}

}  // namespace

AutocastGuard::AutocastGuard(AutocastOptions options)
    : previous_(current_autocast(checked(options).device)) {
  apply(options);
  at::autocast::increment_nesting();
}

AutocastGuard::~AutocastGuard() {
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  apply(previous_);
}

}  // namespace lockstep::optim
