// SPDX-License-Identifier: Apache-2.0
// Groups inside and across hosts.
#pragma once

#include "lockstep/comm/group.h"

namespace lockstep::comm {

// Made by split_by_host().
struct HostGroups {
  Group inside;    // ranks of this host, over shared memory
  Group across;    // the ranks that have this one's place on their hosts, over the group's backend;
                   // of one on ranks whose place not all hosts have
  int hosts = 1;   // in the group
  int places = 1;  // that all hosts have: the size of the smallest
};

// Collective.
HostGroups split_by_host(const Group& group);

}  // namespace lockstep::comm
