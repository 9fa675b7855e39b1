// SPDX-License-Identifier: Apache-2.0
#include "lockstep/comm/backends/nccl/adopt.h"

#include "lockstep/comm/backend.h"
#include "lockstep/comm/backends/nccl/nccl.h"
#include "lockstep/comm/backends/nccl/runtime.h"

namespace lockstep::comm::nccl {

Group adopt(ncclComm* comm, const Group& host) {
  (void)detail::find_backend("nccl");
  return Group(adopt({library().api, cuda_runtime()}, comm, detail::shared_impl_of(host)));
}

}  // namespace lockstep::comm::nccl
