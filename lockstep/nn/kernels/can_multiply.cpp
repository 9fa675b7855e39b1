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

std::string slower_than_float32(double rate, double float32_rate) {
  const double ratio = float32_rate / rate;
  return ratio < kNoticeable ? "" : format("{:.3g} times the time of float32", ratio);
}

}  // namespace lockstep::nn
