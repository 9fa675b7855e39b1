// SPDX-License-Identifier: Apache-2.0
#include "lockstep/parallel/shard/precision.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <mutex>

#include "lockstep/core/format.h"
#include "lockstep/core/log.h"

namespace lockstep::parallel::detail {
namespace {

// Small matrices take another way through the library than those that matter.
bool multiplies(at::ScalarType dtype) {
  const at::NoGradGuard no_grad;
  const at::Tensor matrix = at::ones({64, 64}, at::TensorOptions().dtype(dtype));
  try {
    return at::mm(matrix, matrix).to(at::kFloat).eq(64).all().item<bool>();
  } catch (const std::exception&) {
    return false;
  }
}

bool cpu_multiplies(at::ScalarType dtype) {
  if (dtype != at::kBFloat16 && dtype != at::kHalf) return true;
  static const bool bfloat16 = multiplies(at::kBFloat16);
  static const bool half = multiplies(at::kHalf);
  return dtype == at::kBFloat16 ? bfloat16 : half;
}

void say_once(at::ScalarType dtype) {
  static std::once_flag once;
  std::call_once(once, [&] {
    log::warn(
        format("[fully_shard] this CPU's libtorch cannot multiply {} matrices: parameters are "
               "gathered in {} and computed in float32",
               c10::toString(dtype), c10::toString(dtype)));
  });
}

}  // namespace

void choose_types(FlatPlan& plan, const MixedPrecision& precision) {
  plan.dtype = plan.parameters[0].tensor.scalar_type();
  const bool floating = at::isFloatingType(plan.dtype);
  plan.gather_dtype = floating ? precision.param.value_or(plan.dtype) : plan.dtype;
  plan.compute_dtype = plan.gather_dtype;
  if (plan.gather_dtype != plan.dtype && plan.device.is_cpu() &&
      !cpu_multiplies(plan.gather_dtype)) {
    say_once(plan.gather_dtype);
    plan.compute_dtype = at::kFloat;
  }
  plan.reduce_dtype = floating ? precision.reduce.value_or(plan.gather_dtype) : plan.dtype;
  plan.gradient_dtype = precision.keep_low_precision_grads ? plan.reduce_dtype : plan.dtype;
}

}  // namespace lockstep::parallel::detail
