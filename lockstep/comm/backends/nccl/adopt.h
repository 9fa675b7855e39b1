// SPDX-License-Identifier: Apache-2.0
// A communicator of NCCL that the program already has.
#pragma once

#include "lockstep/comm/group.h"

struct ncclComm;  // ncclComm_t points to it

namespace lockstep::comm::nccl {

// Collective: a group whose CUDA tensors go through `comm` and the rest through `host`, whose ranks
// are the same in the same order (what init() returns, say): NCCL has no way for host memory. The
// communicator stays the program's, which destroys it after the last copy of the group; but a
// failure aborts it, and then there is nothing left to destroy. Messages and splits make
// communicators of their own. Throws ConfigError if NCCL is not available or the ranks differ.
Group adopt(ncclComm* comm, const Group& host);

}  // namespace lockstep::comm::nccl
