// SPDX-License-Identifier: Apache-2.0
// Ranks that are processes of one host: memory files, futexes and the collectives of fabric.
#pragma once

#include "lockstep/comm/backend.h"

namespace lockstep::comm::shm {

bool is_available();
std::shared_ptr<detail::GroupImpl> create(detail::Membership membership);

// Makes the memory that the world's groups share, unless it has some.
void make_heap(detail::World& world);

// A group that moves no data: its ranks only announce operations. Null, on all of them, where one
// cannot open another's memory. Collective.
std::shared_ptr<detail::GroupImpl> create_for_announcements(detail::Membership membership);

}  // namespace lockstep::comm::shm
