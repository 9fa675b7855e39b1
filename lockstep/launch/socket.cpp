#include "lockstep/launch/socket.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <charconv>
#include <cstring>
#include <memory>
#include <thread>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::launch {
namespace {

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

Fd new_socket(int family, int flags) {
  Fd socket(::socket(family, SOCK_STREAM | SOCK_CLOEXEC | flags, 0));
  if (!socket.valid()) throw SystemError("socket", errno);
  return socket;
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
  return {host, port};
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

// One try; an invalid Fd and the reason when it failed.
Fd try_connect(const addrinfo& address, const Deadline& deadline, std::string& reason) {
  Fd socket = new_socket(address.ai_family, SOCK_NONBLOCK);
  if (connect(socket.get(), address.ai_addr, address.ai_addrlen) != 0) {
    if (errno != EINPROGRESS) {
      reason = std::strerror(errno);
      return {};
    }
    pollfd item{socket.get(), POLLOUT, 0};
    int ready = 0;
    do {
      ready =
          poll(&item, 1, static_cast<int>(std::min<long long>(deadline.left().count(), 60'000)));
    } while (ready < 0 && errno == EINTR);
    int failure = ready > 0 ? 0 : ETIMEDOUT;
    socklen_t size = sizeof failure;
    if (ready > 0) getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &failure, &size);
    if (failure != 0) {
      reason = std::strerror(failure);
      return {};
    }
  }
  if (connected_to_itself(socket)) {
    reason = std::strerror(ECONNREFUSED);
    return {};
  }
  return socket;
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

Fd bind_socket(const HostPort& where) {
  std::string reason;
  const Addresses addresses = resolve(where, reason);
  if (!addresses) throw ConfigError(format("cannot listen on {}: {}", where.text(), reason));
  Fd socket = new_socket(addresses->ai_family, SOCK_NONBLOCK);
  // Connections of an earlier job that still time out on this port do not block it.
  set_option(socket, SOL_SOCKET, SO_REUSEADDR, 1);
  if (bind(socket.get(), addresses->ai_addr, addresses->ai_addrlen) != 0) {
    const std::string hint = errno == EADDRNOTAVAIL ? " (not an address of this machine)" : "";
    throw SystemError(format("cannot listen on {}{}", where.text(), hint), errno);
  }
  return socket;
}

void start_listening(const Fd& socket, const HostPort& where) {
  if (listen(socket.get(), 1024) != 0) {
    throw SystemError(format("cannot listen on {}", where.text()), errno);
  }
}

uint16_t port_of(const Fd& socket) {
  return static_cast<uint16_t>(std::stoi(name_of(socket, getsockname).port));
}

std::string host_of(const Fd& socket) { return name_of(socket, getsockname).host; }

std::string peer_of(const Fd& socket) {
  const Name peer = name_of(socket, getpeername);
  return format("{}:{}", peer.host, peer.port);
}

Fd connect_socket(const HostPort& where, const Deadline& deadline) {
  const auto start = Clock::now();
  milliseconds pause{5};
  std::string reason = "no time left";
  while (true) {
    const Addresses addresses = resolve(where, reason);
    for (const addrinfo* address = addresses.get(); address != nullptr;
         address = address->ai_next) {
      Fd socket = try_connect(*address, deadline, reason);
      if (socket.valid()) {
        tune_connection(socket);
        return socket;
      }
    }
    if (deadline.passed()) {
      throw TimeoutError(format("nothing answers at {} after {:.1f} s: {}", where.text(),
                                seconds_since(start), reason));
    }
    std::this_thread::sleep_for(std::min(pause, deadline.left()));
    pause = std::min(pause * 2, milliseconds{200});
  }
}

void tune_connection(const Fd& socket) {
  set_option(socket, IPPROTO_TCP, TCP_NODELAY, 1);
  set_option(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
  set_option(socket, IPPROTO_TCP, TCP_KEEPIDLE, 5);
  set_option(socket, IPPROTO_TCP, TCP_KEEPINTVL, 2);
  set_option(socket, IPPROTO_TCP, TCP_KEEPCNT, 3);
  set_option(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, 10'000);
}

}  // namespace lockstep::launch
