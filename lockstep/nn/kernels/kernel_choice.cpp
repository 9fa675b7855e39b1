// SPDX-License-Identifier: Apache-2.0
#include "lockstep/nn/kernels/activation_kernels.h"
#include "lockstep/nn/kernels/decode_kernels.h"

namespace lockstep::nn {
namespace {

bool has_v3() {
#ifdef __x86_64__
  static const bool has = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  return has;
#else
  return false;
#endif
}

}  // namespace

#ifdef __x86_64__
namespace best = x86_v3;
#else
namespace best = baseline;
#endif

const ActivationKernels& activation_kernels() {
  return has_v3() ? best::kActivations : baseline::kActivations;
}
const DecodeKernels<float>& float_decode_kernels() {
  return has_v3() ? best::kDecodeFloat : baseline::kDecodeFloat;
}
const DecodeKernels<uint16_t>& bfloat16_decode_kernels() {
  return has_v3() ? best::kDecodeBFloat16 : baseline::kDecodeBFloat16;
}

}  // namespace lockstep::nn
