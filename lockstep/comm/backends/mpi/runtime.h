// SPDX-License-Identifier: Apache-2.0
// MPI as a process-wide thing: started once, ended at exit. Private to mpi/.
#pragma once

#include <mpi.h>

namespace lockstep::comm::mpi {

// Starts MPI for many threads, or checks that the program has. Throws ConfigError where that level
// is not given.
void require_mpi();

// An operation did not come to an end: ending MPI at exit would wait for it for ever.
void do_not_finalize();
// While one is alive, an operation is still running that no thread waits for. At exit MPI is
// finalized when all have ended, or not at all after the deadline of operations.
struct Unfinished {
  Unfinished();
  ~Unfinished();
  Unfinished(const Unfinished&) = delete;
  Unfinished& operator=(const Unfinished&) = delete;
};

// Throws CommError with MPI's words unless `code` is MPI_SUCCESS.
void check_mpi(int code, const char* call);

}  // namespace lockstep::comm::mpi
