// SPDX-License-Identifier: Apache-2.0
#include "lockstep/parallel/shard/mixed_precision.h"

#include <ATen/ATen.h>

#include <mutex>

#include "lockstep/core/format.h"
#include "lockstep/core/log.h"
#include "lockstep/nn/kernels/can_multiply.h"

namespace lockstep::parallel::detail {
namespace {

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
  const bool floating = at::isFloatingType(plan.dtype);
  plan.gather_dtype = floating ? precision.param.value_or(plan.dtype) : plan.dtype;
  plan.compute_dtype = plan.gather_dtype;
  if (plan.gather_dtype != plan.dtype && plan.device.is_cpu() &&
      !nn::can_multiply(plan.gather_dtype, at::kCPU)) {
    say_once(plan.gather_dtype);
    plan.compute_dtype = at::kFloat;
  }
  plan.reduce_dtype = floating ? precision.reduce.value_or(plan.gather_dtype) : plan.dtype;
  plan.gradient_dtype = precision.keep_low_precision_grads ? plan.reduce_dtype : plan.dtype;
}

}  // namespace lockstep::parallel::detail
