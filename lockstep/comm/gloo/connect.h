// The Gloo engine of a group, connected rank by rank.
#pragma once

#include "lockstep/comm/gloo/process_group.h"

namespace lockstep::comm::gloo {

// Collective over the members. Each pair of ranks has proven to the other that it belongs to this
// incarnation of the job. Throws PeerLost, or TimeoutError that says why the last attempt failed.
c10::intrusive_ptr<Engine> connect(const detail::Membership& membership);

}  // namespace lockstep::comm::gloo
