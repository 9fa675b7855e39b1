// SPDX-License-Identifier: Apache-2.0
#include "lockstep/nn/kernels/can_multiply.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <map>
#include <mutex>
#include <utility>

#include "lockstep/core/clock.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::nn {
namespace {

constexpr double kNoticeable = 1.25;  // less is noise, or paid back by less memory to move

// Small matrices take another way through the library than those that matter.
bool try_product(at::ScalarType type, c10::Device device) {
  const at::NoGradGuard no_grad;
  try {
    const at::Tensor matrix = at::ones({64, 64}, at::TensorOptions().dtype(type).device(device));
    return at::mm(matrix, matrix).to(at::kFloat).eq(64).all().item<bool>();
  } catch (const std::exception&) {
    return false;
  }
}

}  // namespace

bool can_multiply(at::ScalarType type, c10::Device device) {
  if (type == at::kFloat || type == at::kDouble) return true;
  static std::mutex mutex;
  static std::map<std::pair<at::ScalarType, c10::DeviceType>, bool> known;
  const std::lock_guard lock(mutex);
  const auto [found, is_new] = known.try_emplace({type, device.type()}, false);
  if (is_new) found->second = try_product(type, device);
  return found->second;
}

double multiply_rate(int64_t n, at::ScalarType type, c10::Device device, double seconds) {
  const at::NoGradGuard no_grad;
  const at::Tensor a = at::ones({n, n}, at::TensorOptions().dtype(type).device(device));
  at::Tensor product = at::empty_like(a);
  at::mm_out(product, a, a);  // loads libraries and starts threads
  const auto start = Clock::now();
  int runs = 0;
  double corner = 0;
  do {
    at::mm_out(product, a, a);
    corner = product[0][0].item<double>();  // waits for a GPU
    ++runs;
  } while (seconds_since(start) < seconds);
  const double taken = seconds_since(start);
  if (corner != static_cast<double>(n))
    throw Error(format("a product of ones is {}, must be {}", corner, n));
  const auto size = static_cast<double>(n);
  return 2 * size * size * size * runs / taken / 1e9;
}

double layer_rate(int64_t width, at::ScalarType type, c10::Device device, double seconds) {
  const auto filled = [&](at::IntArrayRef sizes) {
    return at::full(sizes, 0.01, at::TensorOptions().dtype(type).device(device))
        .set_requires_grad(true);
  };
  const at::Tensor x = filled({128, width}), scale = filled({width}),
                   up = filled({4 * width, width}), down = filled({width, 4 * width});
  const auto run = [&] {
    const c10::AutoGradMode grad(true);
    const at::Tensor inner = at::linear(at::layer_norm(x, {width}, scale), up);
    at::linear(at::gelu(inner), down).sum().backward();
    const double corner = up.grad()[0][0].item<double>();  // waits for a GPU
    for (const at::Tensor& each : {x, scale, up, down}) each.mutable_grad().reset();
    return corner;
  };
  run();
  const auto start = Clock::now();
  int runs = 0;
  do {
    run();
    ++runs;
  } while (seconds_since(start) < seconds);
  return runs / seconds_since(start);
}

std::string slower_than_float32(double rate, double float32_rate) {
  const double ratio = float32_rate / rate;
  return ratio < kNoticeable ? "" : format("{:.3g} times the time of float32", ratio);
}

}  // namespace lockstep::nn
