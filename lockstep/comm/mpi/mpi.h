// Ranks that an MPI launcher started.
#pragma once

#include "lockstep/comm/backend.h"

namespace lockstep::comm::mpi {

bool is_available();
std::shared_ptr<detail::GroupImpl> create(detail::Membership membership);

}  // namespace lockstep::comm::mpi
