// SPDX-License-Identifier: Apache-2.0
// The key-value store that torchrun hosts for its workers.
#pragma once

#include <string>

#include "lockstep/core/clock.h"
#include "lockstep/core/rank_env.h"

namespace lockstep::comm {

// True in a worker whose agent keeps the store at MASTER_ADDR:MASTER_PORT, so that no other process
// can listen there.
bool torchrun_hosts_store();

// Rank 0's text, on every rank of the job.
std::string share_through_torchrun(const RankEnv& env, const std::string& text,
                                   const Deadline& deadline);

}  // namespace lockstep::comm
