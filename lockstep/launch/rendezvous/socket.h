// SPDX-License-Identifier: Apache-2.0
// TCP sockets for the rendezvous: addresses, listening, connecting. Everything is close-on-exec.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/core/clock.h"
#include "lockstep/core/fd.h"

namespace lockstep::launch {

struct HostPort {
  std::string host;
  uint16_t port = 0;
  std::string text() const;  // "host:port", an IPv6 host in brackets
};

// Reads "host:port" or "[v6 host]:port"; `what` names the option or variable in the ConfigError.
HostPort parse_host_port(const std::string& text, const std::string& what);
// The same for one or several, with commas between them.
std::vector<HostPort> parse_host_ports(const std::string& text, const std::string& what);

// The numeric addresses that a name means here; none where it is not known.
std::vector<std::string> addresses_of(const std::string& host);
// True as soon as it is known, false at the deadline: some clusters give a host its name late.
bool wait_for_name(const std::string& host, const Deadline& deadline);

// A socket bound to exactly this address with SO_REUSEADDR; port 0 lets the kernel choose. Never
// probes: the port is ours from here on. Throws SystemError naming the address.
Fd bind_socket(const HostPort& where);

// Makes a bound socket accept connections, without blocking.
void start_listening(const Fd& socket, const HostPort& where);

uint16_t port_of(const Fd& socket);

// The numeric addresses of a socket's two ends.
std::string host_of(const Fd& socket);
std::string peer_host_of(const Fd& socket);

// "host:port" of the other end, for messages.
std::string peer_of(const Fd& socket);

// One of these places, the first in the list that answers soon, else the first that answers. Tries
// until the deadline, because the other side may start later. Throws TimeoutError with the last
// reason and the time since `start`, when a caller that tries several times began. The socket does
// not block.
Fd connect_socket(const std::vector<HostPort>& places, const Deadline& deadline,
                  Clock::time_point start = Clock::now());

// No delays for small messages; a vanished host is noticed within seconds.
void tune_connection(const Fd& socket);
// From now on connections of this process are given up after 10 s without an answer, not after 2.
// For ranks of mpirun: if they end before it has noticed that a host is gone, it waits for that
// host for a quarter of an hour.
void give_links_time();

}  // namespace lockstep::launch
