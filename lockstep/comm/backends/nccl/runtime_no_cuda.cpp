// SPDX-License-Identifier: Apache-2.0
// Takes the place of runtime_cuda.cpp in a build without CUDA.
#include "lockstep/comm/backends/nccl/runtime.h"

namespace lockstep::comm::nccl {

const Runtime* cuda_runtime() { return nullptr; }

}  // namespace lockstep::comm::nccl
