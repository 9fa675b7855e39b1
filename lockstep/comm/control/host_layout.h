// SPDX-License-Identifier: Apache-2.0
// Who of a group is on which host. Private: not installed.
#pragma once

#include <string>
#include <vector>

#include "lockstep/comm/backend.h"

namespace lockstep::comm {

struct HostLayout {
  std::vector<std::vector<int>> hosts;  // ranks of the group by host, hosts by their first rank
  std::vector<int> host, place;         // of each rank: its host, and where it is among its ranks
  int places = 0;                       // that all hosts have

  // The ranks that have this one's place on their hosts; itself alone, where not all hosts have it.
  std::vector<int> peers(int rank) const;
  // "2+2": the number of ranks on each host.
  std::string to_text() const;
};
HostLayout host_layout(const Group& group);

// The backend with which ranks of one host communicate, where those of several hosts use `backend`.
std::string backend_inside(const std::string& backend);

namespace detail {

HostLayout host_layout(const Membership& membership);

// `membership` but for its members and name.
Membership subgroup(const Membership& membership, std::string name, const std::vector<int>& ranks);

}  // namespace detail
}  // namespace lockstep::comm
