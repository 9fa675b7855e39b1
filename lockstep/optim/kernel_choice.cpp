#include "lockstep/optim/kernels.h"

namespace lockstep::optim::detail {

const Kernels& kernels() {
#ifdef __x86_64__
  static const bool has_v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                             __builtin_cpu_supports("f16c");
  if (has_v3) return x86_v3::kernels;
#endif
  return baseline::kernels;
}

}  // namespace lockstep::optim::detail
