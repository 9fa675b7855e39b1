// SPDX-License-Identifier: Apache-2.0
#include "lockstep/comm/control/host_groups.h"

#include <algorithm>

#include "lockstep/comm/control/host_layout.h"
#include "lockstep/core/format.h"

namespace lockstep::comm {

HostGroups split_by_host(const Group& group) {
  const detail::Membership& base = detail::impl_of(group).membership();
  const HostLayout layout = detail::host_layout(base);
  const auto me = static_cast<size_t>(group.rank());
  const int host = layout.host[me], place = layout.place[me];
  const std::string name = format("{}.{}", base.name, detail::impl_of(group).next_split());
  const std::string& backend = detail::impl_of(group).backend();

  HostGroups groups;
  groups.hosts = static_cast<int>(layout.hosts.size());
  groups.places = layout.places;
  groups.inside =
      Group(detail::make_plain_group(detail::subgroup(base, format("{}/host{}", name, host),
                                                      layout.hosts[static_cast<size_t>(host)]),
                                     backend_inside(backend)));
  groups.across = Group(detail::make_plain_group(
      detail::subgroup(base, format("{}/across{}", name, place), layout.peers(group.rank())),
      backend));
  return groups;
}

std::string HostLayout::to_text() const {
  std::vector<size_t> sizes;
  for (const auto& ranks : hosts) sizes.push_back(ranks.size());
  return join(sizes, "+");
}

std::vector<int> HostLayout::peers(int rank) const {
  const auto at = static_cast<size_t>(place[static_cast<size_t>(rank)]);
  if (at >= static_cast<size_t>(places)) return {rank};
  std::vector<int> ranks;
  for (const auto& members : hosts) ranks.push_back(members[at]);
  return ranks;
}

HostLayout host_layout(const Group& group) {
  return detail::host_layout(detail::impl_of(group).membership());
}

std::string backend_inside(const std::string& backend) {
  return backend == "thread" ? backend : "shm";
}

namespace detail {

HostLayout host_layout(const Membership& membership) {
  HostLayout layout;
  std::vector<int> numbers;  // of the hosts that have been seen
  for (int rank = 0; rank < membership.size(); ++rank) {
    const int number =
        membership.world->hosts[static_cast<size_t>(membership.members[static_cast<size_t>(rank)])];
    const auto found = std::find(numbers.begin(), numbers.end(), number);
    const auto host = static_cast<size_t>(found - numbers.begin());
    if (found == numbers.end()) {
      numbers.push_back(number);
      layout.hosts.emplace_back();
    }
    layout.host.push_back(static_cast<int>(host));
    layout.place.push_back(static_cast<int>(layout.hosts[host].size()));
    layout.hosts[host].push_back(rank);
  }
  const auto smallest =
      std::min_element(layout.hosts.begin(), layout.hosts.end(),
                       [](const auto& a, const auto& b) { return a.size() < b.size(); });
  layout.places = static_cast<int>(smallest->size());
  return layout;
}

Membership subgroup(const Membership& membership, std::string name, const std::vector<int>& ranks) {
  Membership sub{std::move(name), 0, {}, membership.world};
  for (const int rank : ranks) {
    if (rank == membership.rank) sub.rank = sub.size();
    sub.members.push_back(membership.members[static_cast<size_t>(rank)]);
  }
  return sub;
}

}  // namespace detail
}  // namespace lockstep::comm
