// SPDX-License-Identifier: Apache-2.0
#include "lockstep/fabric/reduce.h"

#include <cstring>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/fabric/reduce_kernels.h"

namespace lockstep::fabric {
namespace {

ReduceKernel best_kernel(DType dtype, ReduceOp op) {
#ifdef __x86_64__
  static const bool has_v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                             __builtin_cpu_supports("f16c");
  if (has_v3) return x86_v3::find_kernel(dtype, op);
#endif
  return baseline::find_kernel(dtype, op);
}

}  // namespace

void check_reducible(DType dtype, ReduceOp op) {
  if (dtype == DType::boolean && op == ReduceOp::avg) {
    throw ConfigError(
        "reduction avg of bool has no meaning; use sum or max for any, product or min for all");
  }
}

void reduce(DType dtype, ReduceOp op, std::span<std::byte* const> outputs,
            std::span<const std::byte* const> inputs, size_t count) {
  if (count == 0 || outputs.empty()) return;
  check_reducible(dtype, op);
  best_kernel(dtype, op)(outputs.data(), outputs.size(), inputs.data(), inputs.size(), count);
}

}  // namespace lockstep::fabric
