// SPDX-License-Identifier: Apache-2.0
// A group over a user's transports.
#pragma once

#include <memory>
#include <string>

#include "lockstep/comm/backend.h"
#include "lockstep/comm/custom_backend.h"

namespace lockstep::comm::detail {

std::shared_ptr<GroupImpl> make_custom_group(Membership membership, const std::string& backend,
                                             const TransportFactory& create);

}  // namespace lockstep::comm::detail
