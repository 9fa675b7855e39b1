// SPDX-License-Identifier: Apache-2.0
// A group whose ranks share memory: the thread and shm backends over fabric.
#pragma once

#include <memory>

#include "lockstep/comm/backend.h"
#include "lockstep/fabric/engine.h"

namespace lockstep::comm::detail {

// Collective: returns when all members have come. `heap` is null where ranks are threads. `probe`
// says how a peer died, or nothing. What runs elsewhere is not `traced` here.
std::shared_ptr<GroupImpl> make_local_group(Membership membership, const std::string& backend,
                                            std::shared_ptr<fabric::Board> board,
                                            std::shared_ptr<fabric::SharedHeap> heap,
                                            std::function<std::string(int rank)> probe,
                                            bool traced = true);

}  // namespace lockstep::comm::detail
