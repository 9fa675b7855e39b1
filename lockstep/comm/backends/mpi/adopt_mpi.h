// SPDX-License-Identifier: Apache-2.0
// For programs that use MPI themselves: their communicator as a group. Needs the headers of the MPI
// that Lockstep was built with.
#pragma once

#include <mpi.h>

#include <utility>

#include "lockstep/comm/group.h"

namespace lockstep::comm {

namespace mpi {
// Throws ConfigError where MPI does not run, or not for many threads: communicators mean nothing
// then.
void require_running();
// `handle` is the communicator as Fortran knows it: an int in every MPI.
Group adopt(int handle, InitOptions options);
}  // namespace mpi

// The ranks of `comm` as a group, over a duplicate: the program may continue to use its own.
// Collective over `comm`. MPI must have been started with MPI_THREAD_MULTIPLE, and must end after
// the last use of the group. With a backend other than "auto" the same ranks communicate over that.
inline Group adopt(MPI_Comm comm, InitOptions options = {}) {
  mpi::require_running();
  return mpi::adopt(MPI_Comm_c2f(comm), std::move(options));
}

}  // namespace lockstep::comm
