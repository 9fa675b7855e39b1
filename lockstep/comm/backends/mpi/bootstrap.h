// SPDX-License-Identifier: Apache-2.0
// The first contact under an MPI launcher, whatever backend is used afterwards.
#pragma once

#include <string>

namespace lockstep::comm::mpi {

// Rank 0's text, on every rank of the job. Starts MPI if the program has not.
std::string share_from_rank0(const std::string& text);

}  // namespace lockstep::comm::mpi
