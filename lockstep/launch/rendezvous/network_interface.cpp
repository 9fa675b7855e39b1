// SPDX-License-Identifier: Apache-2.0
#include "lockstep/launch/rendezvous/network_interface.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <memory>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::launch {
namespace {

struct Interface {
  std::string name;
  bool up = false;
  std::vector<std::string> addresses;
};

bool is_v6(const std::string& address) { return address.find(':') != std::string::npos; }

// fe80::/10 means another host on every link, so it cannot be told to others.
bool is_link_local(const sockaddr& address) {
  if (address.sa_family != AF_INET6) return false;
  return IN6_IS_ADDR_LINKLOCAL(&reinterpret_cast<const sockaddr_in6&>(address).sin6_addr);
}

std::vector<Interface> interfaces() {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) throw SystemError("getifaddrs", errno);
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> owner(list, &freeifaddrs);
  std::vector<Interface> found;
  for (const ifaddrs* item = list; item != nullptr; item = item->ifa_next) {
    auto known = std::find_if(found.begin(), found.end(), [&](const Interface& interface) {
      return interface.name == item->ifa_name;
    });
    if (known == found.end()) {
      known = found.insert(found.end(), {item->ifa_name, (item->ifa_flags & IFF_UP) != 0, {}});
    }
    const sockaddr* const address = item->ifa_addr;
    if (address == nullptr || is_link_local(*address)) continue;
    if (address->sa_family != AF_INET && address->sa_family != AF_INET6) continue;
    char text[NI_MAXHOST];
    const socklen_t size =
        address->sa_family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    if (getnameinfo(address, size, text, sizeof text, nullptr, 0, NI_NUMERICHOST) == 0) {
      known->addresses.emplace_back(text);
    }
  }
  return found;
}

// "lo (127.0.0.1, ::1), eth0 (no address)"
std::string list_of(const std::vector<Interface>& all) {
  std::vector<std::string> texts;
  for (const Interface& interface : all) {
    texts.push_back(format("{} ({})", interface.name,
                           !interface.up                 ? "down"
                           : interface.addresses.empty() ? "no address"
                                                         : join(interface.addresses)));
  }
  return join(texts);
}

Interface find_interface(const std::string& name) {
  const auto all = interfaces();
  for (const Interface& interface : all) {
    if (interface.name != name) continue;
    if (interface.up && !interface.addresses.empty()) return interface;
    throw ConfigError(format("--interface or LOCKSTEP_INTERFACE: {} {}; there are {}", name,
                             interface.up ? "has no address" : "is down", list_of(all)));
  }
  throw ConfigError(
      format("--interface or LOCKSTEP_INTERFACE: this machine has no '{}'; there are {}", name,
             list_of(all)));
}

}  // namespace

std::string interface_from_environment() {
  const char* const name = std::getenv("LOCKSTEP_INTERFACE");
  return name == nullptr ? "" : name;
}

std::string address_of_interface(const std::string& name, const std::string& like) {
  const auto addresses = find_interface(name).addresses;
  const auto same = std::find_if(addresses.begin(), addresses.end(), [&](const auto& address) {
    return is_v6(address) == is_v6(like);
  });
  return same == addresses.end() ? addresses.front() : *same;
}

std::vector<std::string> outward_addresses() {
  std::vector<std::string> addresses;
  for (const Interface& interface : interfaces()) {
    for (const std::string& address : interface.addresses) {
      if (interface.up && !is_loopback(address)) addresses.push_back(address);
    }
  }
  return addresses;
}

HostPort listening_address(const HostPort& where, const std::string& interface) {
  if (interface.empty()) return where;
  const auto mine = find_interface(interface).addresses;
  const auto named = addresses_of(where.host);
  for (const std::string& address : named) {
    if (std::find(mine.begin(), mine.end(), address) != mine.end()) return {address, where.port};
  }
  // A name that means this machine's loopback here, as Debian writes it into /etc/hosts, or an
  // address that is translated on the way, is fine: others have come to know it.
  for (const Interface& other : interfaces()) {
    for (const std::string& address : other.addresses) {
      if (is_loopback(address)) continue;
      if (std::find(named.begin(), named.end(), address) == named.end()) continue;
      throw ConfigError(format(
          "--interface or LOCKSTEP_INTERFACE: the rendezvous address is {}, which is {} on {}, not "
          "on {} ({})",
          where.text(), address, other.name, interface, join(mine)));
    }
  }
  return {address_of_interface(interface, named.empty() ? "" : named.front()), where.port};
}

bool is_loopback(const std::string& address) {
  return address.starts_with("127.") || address == "::1";
}

}  // namespace lockstep::launch
