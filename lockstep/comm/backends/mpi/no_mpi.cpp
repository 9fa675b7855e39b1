// SPDX-License-Identifier: Apache-2.0
// Takes the place of mpi.cpp in a build without MPI.
#include "lockstep/comm/backends/mpi/bootstrap.h"
#include "lockstep/comm/backends/mpi/mpi.h"
#include "lockstep/comm/group.h"
#include "lockstep/core/error.h"

namespace lockstep::comm::mpi {

bool is_available() { return false; }
std::string version() { return ""; }

std::shared_ptr<detail::GroupImpl> create(detail::Membership) {
  throw ConfigError("backend 'mpi' is not part of this build");
}

// Declared in adopt_mpi.h, which needs MPI's headers.
void require_running() { throw ConfigError("[adopt] MPI is not part of this build of Lockstep"); }
Group adopt(int, InitOptions) { return {}; }

std::string share_from_rank0(const std::string&) {
  throw ConfigError(
      "this process was started by an MPI launcher, but MPI is not part of this build; use "
      "lockstep run, or set "
      "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT");
}

}  // namespace lockstep::comm::mpi
