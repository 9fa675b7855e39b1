// SPDX-License-Identifier: Apache-2.0
// Ranks that an MPI launcher started.
#pragma once

#include "lockstep/comm/backend.h"

namespace lockstep::comm::mpi {

bool is_available();
// In the words of the library, up to the first comma.
std::string version();
std::shared_ptr<detail::GroupImpl> create(detail::Membership membership);

}  // namespace lockstep::comm::mpi
