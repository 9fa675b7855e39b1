// SPDX-License-Identifier: Apache-2.0
// An NCCL and a CUDA runtime of threads and host memory, for thread ranks: CPU tensors count as
// memory of device 0. It keeps NCCL's rules (nothing blocks, a send waits for its recv, an abort is
// local) and a list of all calls.
#pragma once

#include <string>
#include <vector>

#include "lockstep/comm/backends/nccl/runtime.h"

namespace lockstep::comm::fake {

struct Call {
  std::string function;
  int rank = -1, size = 0;  // of its communicator
  size_t count = 0;
  nccl::DataType type = nccl::DataType::uint8;
  int op = -1;    // a RedOp
  int peer = -1;  // or root
  const void* comm = nullptr;
  const void* stream = nullptr;
  bool grouped = false;  // between group_start and group_end

  // "all_reduce(1000 x 7, op 4)": what NCCL would do, without addresses.
  std::string text() const;
};

nccl::Engine engine();
// The same without ncclMemAlloc and ncclCommRegister, as before 2.19.
nccl::Engine old_engine();

// What was called since the last time, by all ranks; of one function, or of all.
std::vector<Call> take_calls();
std::vector<std::string> texts(const std::vector<Call>& calls, int rank);
size_t count(const std::vector<Call>& calls, const std::string& function);

// The communicators of this rank report an error from now on; success ends that.
void set_async_error(int rank, nccl::Result error);
// Calls of this function fail from now on; an empty name ends that.
void fail_calls_of(const std::string& function);
// Calls of this function do not return from now on; an empty name ends that.
void hold_calls_of(const std::string& function);
// Returns when one is held.
void wait_for_held_call();

}  // namespace lockstep::comm::fake
