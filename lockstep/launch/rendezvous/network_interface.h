// SPDX-License-Identifier: Apache-2.0
// Network interfaces of this host: which of them a job uses, and by which addresses others reach
// it.
#pragma once

#include <string>
#include <vector>

#include "lockstep/launch/rendezvous/socket.h"

namespace lockstep::launch {

// What LOCKSTEP_INTERFACE names; empty: nothing.
std::string interface_from_environment();

// An address of this interface, of the same family as `like` (a numeric address) where it has one.
// Throws ConfigError that lists the interfaces there are.
std::string address_of_interface(const std::string& name, const std::string& like = "");

// By which other hosts may reach this one: the addresses of all interfaces that are up, without
// loopback and those that are only good on one link.
std::vector<std::string> outward_addresses();

// Where the one whom all know as `where` listens: there, or at that port on `interface` if one is
// named. Throws ConfigError where `where` is an address of another interface.
HostPort listening_address(const HostPort& where, const std::string& interface);

// No other host can come to this numeric address.
bool is_loopback(const std::string& address);

}  // namespace lockstep::launch
