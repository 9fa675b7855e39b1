// SPDX-License-Identifier: Apache-2.0
#include "lockstep/optim/kernels/kernels.h"
#include "lockstep/optim/kernels/packed_kernels.h"

namespace lockstep::optim::detail {
namespace {

#ifdef __x86_64__
bool has_v3() {
  static const bool has = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                          __builtin_cpu_supports("f16c");
  return has;
}
#endif

}  // namespace

const Kernels& kernels() {
#ifdef __x86_64__
  if (has_v3()) return x86_v3::kernels;
#endif
  return baseline::kernels;
}

const PackedKernels& packed_kernels() {
#ifdef __x86_64__
  if (has_v3()) return x86_v3::packed_kernels;
#endif
  return baseline::packed_kernels;
}

}  // namespace lockstep::optim::detail
