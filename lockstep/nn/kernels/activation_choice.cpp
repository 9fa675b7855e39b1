// SPDX-License-Identifier: Apache-2.0
#include "lockstep/nn/kernels/activation_kernels.h"

namespace lockstep::nn {

const ActivationKernels& activation_kernels() {
#ifdef __x86_64__
  static const bool has_v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (has_v3) return x86_v3::kActivations;
#endif
  return baseline::kActivations;
}

}  // namespace lockstep::nn
