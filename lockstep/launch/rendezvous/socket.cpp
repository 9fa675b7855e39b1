// SPDX-License-Identifier: Apache-2.0
#include "lockstep/launch/rendezvous/socket.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <atomic>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <memory>
#include <thread>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/launch/rendezvous/network_interface.h"

namespace lockstep::launch {
namespace {

std::atomic<bool> links_have_time{false};

// Then all addresses are tried again: one may have come up that was refused before.
constexpr milliseconds kRound{3'000};
// So long an address that has answered waits for those that come before it in the list.
constexpr milliseconds kHeadStart{500};

using Addresses = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

// Empty, and `reason` filled in, where the name is not known.
Addresses resolve(const HostPort& where, std::string& reason) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV;
  addrinfo* list = nullptr;
  const std::string port = std::to_string(where.port);
  const int failure = getaddrinfo(where.host.c_str(), port.c_str(), &hints, &list);
  if (failure != 0) {
    reason = failure == EAI_SYSTEM ? std::strerror(errno) : gai_strerror(failure);
    list = nullptr;
  }
  return {list, &freeaddrinfo};
}

void set_option(const Fd& socket, int level, int name, int value) {
  ::setsockopt(socket.get(), level, name, &value, sizeof value);
}

struct Name {
  std::string host = "?", port = "0";
};

// `ask` is getsockname or getpeername.
Name name_of(const Fd& socket, int (*ask)(int, sockaddr*, socklen_t*)) {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  auto* const generic = reinterpret_cast<sockaddr*>(&address);
  char host[NI_MAXHOST], port[NI_MAXSERV];
  if (ask(socket.get(), generic, &size) != 0 ||
      getnameinfo(generic, size, host, sizeof host, port, sizeof port,
                  NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
    return {};
  }
  // What a listener on all addresses of both families says of an IPv4 peer.
  const std::string_view mapped = "::ffff:";
  const std::string text(host);
  if (text.starts_with(mapped) && text.find('.') != std::string::npos) {
    return {text.substr(mapped.size()), port};
  }
  return {text, port};
}

// A loopback connect to a free port of the ephemeral range can meet itself (simultaneous open).
bool connected_to_itself(const Fd& socket) {
  sockaddr_storage mine{}, theirs{};
  socklen_t my_size = sizeof mine, their_size = sizeof theirs;
  if (getsockname(socket.get(), reinterpret_cast<sockaddr*>(&mine), &my_size) != 0) return false;
  if (getpeername(socket.get(), reinterpret_cast<sockaddr*>(&theirs), &their_size) != 0)
    return false;
  return my_size == their_size && std::memcmp(&mine, &theirs, my_size) == 0;
}

// All addresses at once, so that one that swallows packets does not hold up the others. All who
// call shall come by the same one where they can: it is how engines choose their network. An
// invalid Fd and the last reason when none has answered.
Fd try_connect(const std::vector<HostPort>& places, const Deadline& deadline, std::string& reason) {
  std::vector<Fd> sockets;
  for (const HostPort& place : places) {
    const Addresses addresses = resolve(place, reason);
    for (const addrinfo* address = addresses.get(); address != nullptr;
         address = address->ai_next) {
      Fd socket(::socket(address->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
      const bool begun =
          socket.valid() && (connect(socket.get(), address->ai_addr, address->ai_addrlen) == 0 ||
                             errno == EINPROGRESS);
      if (begun) {
        sockets.push_back(std::move(socket));
      } else if (errno == ENETUNREACH && is_loopback(place.host)) {
        throw ConfigError(
            format("cannot connect to {}: the loopback interface of this host is down (`ip link "
                   "set lo up`)",
                   place.text()));
      } else {
        reason = std::strerror(errno);
      }
    }
  }
  const Deadline head_start(std::min(kHeadStart, deadline.left()));
  Fd answered;  // of those that are left in `sockets` all come before it
  while (!sockets.empty()) {
    std::vector<pollfd> items;
    for (const Fd& socket : sockets) items.push_back({socket.get(), POLLOUT, 0});
    const Deadline& until = answered.valid() ? head_start : deadline;
    const int ready = poll(items.data(), items.size(), static_cast<int>(until.left().count()));
    if (ready < 0 && errno == EINTR) continue;
    if (ready <= 0) {
      reason = std::strerror(ready < 0 ? errno : ETIMEDOUT);
      return answered;
    }
    std::vector<Fd> pending;
    for (size_t i = 0; i < items.size(); ++i) {
      if (items[i].revents == 0) {
        pending.push_back(std::move(sockets[i]));
        continue;
      }
      int failure = 0;
      socklen_t size = sizeof failure;
      getsockopt(sockets[i].get(), SOL_SOCKET, SO_ERROR, &failure, &size);
      if (failure == 0 && connected_to_itself(sockets[i])) failure = ECONNREFUSED;
      if (failure == 0) {
        answered = std::move(sockets[i]);
        break;
      }
      reason = std::strerror(failure);
    }
    sockets = std::move(pending);
  }
  return answered;
}

SystemError cannot_listen(const HostPort& where, int failure) {
  const char* const hint = failure == EADDRNOTAVAIL ? " (not an address of this machine)"
                           : failure == EADDRINUSE  ? " (choose another port)"
                                                    : "";
  return {format("cannot listen on {}{}", where.text(), hint), failure};
}

}  // namespace

std::string HostPort::text() const {
  return host.find(':') == std::string::npos ? format("{}:{}", host, port)
                                             : format("[{}]:{}", host, port);
}

HostPort parse_host_port(const std::string& text, const std::string& what) {
  HostPort result;
  const size_t colon = text.rfind(':');
  bool good = colon != std::string::npos && colon > 0;
  if (good) {
    result.host = text.substr(0, colon);
    if (result.host.front() == '[' && result.host.back() == ']') {
      result.host = result.host.substr(1, result.host.size() - 2);
    } else {
      good = result.host.find(':') == std::string::npos;
    }
    const char* const end = text.data() + text.size();
    const auto parsed = std::from_chars(text.data() + colon + 1, end, result.port);
    good = good && !result.host.empty() && parsed.ec == std::errc() && parsed.ptr == end;
  }
  if (!good) {
    throw ConfigError(format("{}: '{}' is not HOST:PORT with a port from 0 to 65535", what, text));
  }
  return result;
}

std::vector<HostPort> parse_host_ports(const std::string& text, const std::string& what) {
  std::vector<HostPort> places;
  size_t at = 0;
  do {
    const size_t comma = std::min(text.find(',', at), text.size());
    places.push_back(parse_host_port(text.substr(at, comma - at), what));
    at = comma + 1;
  } while (at <= text.size());
  return places;
}

std::vector<std::string> addresses_of(const std::string& host) {
  std::string reason;
  const Addresses addresses = resolve({host, 0}, reason);
  std::vector<std::string> texts;
  for (const addrinfo* address = addresses.get(); address != nullptr; address = address->ai_next) {
    char text[NI_MAXHOST];
    if (getnameinfo(address->ai_addr, address->ai_addrlen, text, sizeof text, nullptr, 0,
                    NI_NUMERICHOST) == 0) {
      texts.emplace_back(text);
    }
  }
  return texts;
}

bool wait_for_name(const std::string& host, const Deadline& deadline) {
  while (addresses_of(host).empty()) {
    if (deadline.passed()) return false;
    std::this_thread::sleep_for(std::min(milliseconds{200}, deadline.left()));
  }
  return true;
}

Fd bind_socket(const HostPort& where) {
  std::string reason;
  const Addresses addresses = resolve(where, reason);
  if (!addresses) throw ConfigError(format("cannot listen on {}: {}", where.text(), reason));
  int failure = 0;
  for (const addrinfo* address = addresses.get(); address != nullptr; address = address->ai_next) {
    Fd socket(::socket(address->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!socket.valid()) {
      failure = errno;  // such as a kernel without IPv6
      continue;
    }
    // Connections of an earlier job that still time out on this port do not block it.
    set_option(socket, SOL_SOCKET, SO_REUSEADDR, 1);
    // "::" is every address of both families, whatever this machine's default is.
    if (address->ai_family == AF_INET6) set_option(socket, IPPROTO_IPV6, IPV6_V6ONLY, 0);
    if (bind(socket.get(), address->ai_addr, address->ai_addrlen) == 0) return socket;
    failure = errno;
  }
  throw cannot_listen(where, failure);
}

void start_listening(const Fd& socket, const HostPort& where) {
  if (listen(socket.get(), 1024) != 0) {
    throw cannot_listen(where, errno);
  }
}

uint16_t port_of(const Fd& socket) {
  return static_cast<uint16_t>(std::stoi(name_of(socket, getsockname).port));
}

std::string host_of(const Fd& socket) { return name_of(socket, getsockname).host; }

std::string peer_host_of(const Fd& socket) { return name_of(socket, getpeername).host; }

std::string peer_of(const Fd& socket) {
  const Name peer = name_of(socket, getpeername);
  return HostPort{peer.host, static_cast<uint16_t>(std::stoi(peer.port))}.text();
}

Fd connect_socket(const std::vector<HostPort>& places, const Deadline& deadline,
                  Clock::time_point start) {
  milliseconds pause{5};
  std::string reason = "no time left";
  while (true) {
    Fd socket = try_connect(places, Deadline(std::min(deadline.left(), kRound)), reason);
    if (socket.valid()) {
      tune_connection(socket);
      return socket;
    }
    if (deadline.passed()) {
      std::vector<std::string> texts;
      for (const HostPort& place : places) texts.push_back(place.text());
      throw TimeoutError(format(
          "nothing answers at {} after {:.1f} s: {}; check that node 0 is started and that no "
          "firewall blocks the port",
          join(texts), seconds_since(start), reason));
    }
    std::this_thread::sleep_for(std::min(pause, deadline.left()));
    pause = std::min(pause * 2, milliseconds{200});
  }
}

void give_links_time() { links_have_time = true; }

void tune_connection(const Fd& socket) {
  const bool patient = links_have_time;
  set_option(socket, IPPROTO_TCP, TCP_NODELAY, 1);
  set_option(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
  // Launchers and waiting ranks ask several times a second, so there is always something to be
  // acknowledged. The peer's kernel does that, however busy its processes are: after this time the
  // host or the link is gone. Shorter outages pass.
  set_option(socket, IPPROTO_TCP, TCP_KEEPIDLE, patient ? 5 : 1);
  set_option(socket, IPPROTO_TCP, TCP_KEEPINTVL, patient ? 2 : 1);
  set_option(socket, IPPROTO_TCP, TCP_KEEPCNT, patient ? 3 : 1);
  set_option(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, patient ? 10'000 : 1'700);
}

}  // namespace lockstep::launch
