// SPDX-License-Identifier: Apache-2.0
// Ranks that are threads of one process: all memory is in reach.
#pragma once

#include "lockstep/comm/backend.h"

namespace lockstep::comm::thread {

bool is_available();
std::shared_ptr<detail::GroupImpl> create(detail::Membership membership);

}  // namespace lockstep::comm::thread
