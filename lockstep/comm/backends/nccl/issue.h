// SPDX-License-Identifier: Apache-2.0
// From an operation to the calls of NCCL that do it.
#pragma once

#include "lockstep/comm/backends/nccl/runtime.h"
#include "lockstep/fabric/operation.h"

namespace lockstep::comm::nccl {

// A communicator, and this rank's place in it.
struct Seat {
  ncclComm* comm = nullptr;
  CUstream_st* stream = nullptr;
  int rank = 0, size = 0;
};

// Queues the operation on the stream. Blocks of unequal size are one broadcast, or reduction, each;
// what NCCL has no name for is sends and receives; a rank's own blocks are copied. A message has a
// communicator of its two ranks. The worst result of the calls.
Result issue(const Engine& engine, const Seat& seat, const fabric::Operation& operation);

}  // namespace lockstep::comm::nccl
