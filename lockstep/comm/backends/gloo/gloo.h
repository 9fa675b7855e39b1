// SPDX-License-Identifier: Apache-2.0
// Gloo, by way of the process group in libtorch.
#pragma once

#include "lockstep/comm/backend.h"

namespace lockstep::comm::gloo {

bool is_available();
std::shared_ptr<detail::GroupImpl> create(detail::Membership membership);

}  // namespace lockstep::comm::gloo
