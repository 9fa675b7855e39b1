// SPDX-License-Identifier: Apache-2.0
#include "lockstep/nn/random/random.h"

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <ATen/core/grad_mode.h>

#include <cmath>
#include <type_traits>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/nn/random/random_cuda.h"
#include "lockstep/nn/random/random_runs.h"

namespace lockstep::nn {
namespace {

// A value as the kernels take it.
float checked(double value, const char* what) {
  if (!std::isfinite(static_cast<float>(value))) {
    throw ConfigError(format("[distribution] {} is {}, must be a finite float32", what, value));
  }
  return static_cast<float>(value);
}

// How much of a standard normal distribution is below x.
double normal_below(double x) { return 0.5 * std::erfc(-x / std::sqrt(2.0)); }

template <class T>
void fill_memory(T* data, const RandomKey& key, const Distribution& distribution,
                 const Runs& runs) {
  const auto draw = cpu_kernels().draw;
  for_pieces(runs, [&](int64_t place, uint64_t index, int64_t count) {
    if constexpr (std::is_same_v<T, float>) {
      draw(key, index, count, distribution, data + place);
    } else {
      float values[kPiece];
      draw(key, index, count, distribution, values);
      for (int64_t i = 0; i < count; ++i) data[place + i] = static_cast<T>(values[i]);
    }
  });
}

void fill_on_cpu(const at::Tensor& out, const RandomKey& key, const Distribution& distribution,
                 const Runs& runs) {
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, out.scalar_type(), "fill", [&] {
    fill_memory(out.data_ptr<scalar_t>(), key, distribution, runs);
  });
}

}  // namespace

Distribution Distribution::uniform(double low, double high) {
  if (!(low <= high)) {
    throw ConfigError(
        format("[distribution] uniform from {} to {}, must not end before it begins", low, high));
  }
  return {.kind = Kind::uniform,
          .offset = checked(low, "the lower end"),
          .scale = checked(high - low, "the width")};
}

Distribution Distribution::normal(double mean, double std) {
  if (!(std >= 0)) {
    throw ConfigError(format("[distribution] the deviation is {}, must not be negative", std));
  }
  return {.kind = Kind::normal,
          .offset = checked(mean, "the mean"),
          .scale = checked(std, "the deviation")};
}

Distribution Distribution::truncated_normal(double mean, double std, double low, double high) {
  auto distribution = normal(mean, std);
  const double held = normal_below((high - mean) / std) - normal_below((low - mean) / std);
  if (!(held >= 0.01)) {
    throw ConfigError(
        format("[distribution] [{}, {}] holds {} of a normal distribution of mean {} and deviation "
               "{}, must hold at least 0.01",
               low, high, held, mean, std));
  }
  distribution.low = static_cast<float>(low);
  distribution.high = static_cast<float>(high);
  return distribution;
}

void fill(const at::Tensor& tensor, const RandomKey& key, const Distribution& distribution,
          const std::optional<Slice>& slice) {
  if (!tensor.is_floating_point()) {
    throw ConfigError(
        format("[fill] dtype is {}, must be a floating one", c10::toString(tensor.scalar_type())));
  }
  const Runs runs = runs_of(tensor.sizes().vec(), slice, "fill");
  if (tensor.numel() == 0 || tensor.is_meta()) return;

  const at::NoGradGuard no_grad;
  const bool has_kernels = tensor.is_cpu() || (tensor.is_cuda() && cuda::is_available());
  const bool in_place = has_kernels && tensor.is_contiguous();
  const auto device = has_kernels ? tensor.device() : at::Device(at::kCPU);
  const at::Tensor out =
      in_place ? tensor : at::empty(tensor.sizes(), tensor.options().device(device));
  if (out.is_cpu()) {
    fill_on_cpu(out, key, distribution, runs);
  } else {
    cuda::fill(out, key, distribution, runs);
  }
  if (in_place) {
    tensor.unsafeGetTensorImpl()->bump_version();
  } else {
    tensor.copy_(out);
  }
}

}  // namespace lockstep::nn
