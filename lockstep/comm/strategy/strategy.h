// SPDX-License-Identifier: Apache-2.0
// Groups whose collectives are formed by a strategy of ours instead of the backend's own.
#pragma once

#include <memory>
#include <string>

#include "lockstep/comm/backend.h"

namespace lockstep::comm::strategy {

// A group of this backend, by the strategy of its world. Collective over its members. Where the
// strategy has nothing to add, such as a hierarchy of one rank per host, it is the backend's.
std::shared_ptr<detail::GroupImpl> create(detail::Membership membership, std::string backend);

}  // namespace lockstep::comm::strategy
