// SPDX-License-Identifier: Apache-2.0
// The Gloo engine of a group, connected rank by rank.
#pragma once

#include "lockstep/comm/backends/gloo/process_group.h"

namespace lockstep::comm::gloo {

// Its next collective runs under a tag of ours.
class TaggedGloo final : public c10d::ProcessGroupGloo {
 public:
  using ProcessGroupGloo::ProcessGroupGloo;
  void set_tag(uint32_t tag) { collectiveCounter_ = tag; }
};

// Collective over the members. Each pair of ranks has proven to the other that it belongs to this
// incarnation of the job. Throws PeerLost, or TimeoutError that says why the last attempt failed.
c10::intrusive_ptr<TaggedGloo> connect(const detail::Membership& membership);

}  // namespace lockstep::comm::gloo
