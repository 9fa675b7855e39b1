// SPDX-License-Identifier: Apache-2.0
#include "lockstep/nn/kernels/can_multiply.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <map>
#include <mutex>
#include <utility>

namespace lockstep::nn {
namespace {

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

}  // namespace lockstep::nn
