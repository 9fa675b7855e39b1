// Ranks that are processes of one host: memory files, futexes and the collectives of fabric.
#pragma once

#include "lockstep/comm/backend.h"

namespace lockstep::comm::shm {

bool is_available();
std::shared_ptr<detail::GroupImpl> create(detail::Membership membership);

}  // namespace lockstep::comm::shm
