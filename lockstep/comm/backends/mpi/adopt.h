// SPDX-License-Identifier: Apache-2.0
// The half of adopt_mpi.h that needs no header of MPI.
#pragma once

#include "lockstep/comm/group.h"

namespace lockstep::comm::mpi {

// Throws ConfigError where MPI does not run, or not for many threads: communicators mean nothing
// then.
void require_running();
// `handle` is the communicator as Fortran knows it: an int in every MPI.
Group adopt(int handle, InitOptions options);

}  // namespace lockstep::comm::mpi
