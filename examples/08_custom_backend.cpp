// SPDX-License-Identifier: Apache-2.0
// A backend of one's own: Unix sockets between all pairs of ranks. Three functions carry bytes; the
// library makes collectives of them, with deadlines, checks, and the sums of its other backends.
//
// $ lockstep run -n 3 build/bin/08_custom_backend
// [rank0]: 3 ranks over sockets: all checks hold
// [rank0]: ddp over sockets averages gradients: 2
#include <sys/socket.h>
#include <sys/un.h>
#include <torch/nn/modules/linear.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <iostream>
#include <set>
#include <utility>

#include "lockstep/lockstep.h"

using namespace lockstep;

// A descriptor that closes itself.
class Socket {
 public:
  explicit Socket(int fd = -1) : fd_(fd) {}
  Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Socket() {
    if (fd_ >= 0) close(fd_);
  }
  int get() const { return fd_; }

 private:
  int fd_;
};

class Sockets final : public comm::Transport {
 public:
  // Ranks connect to all lower ones. The kernel chooses names for the sockets, which need no file.
  explicit Sockets(const comm::TransportSite& site) : peers_(static_cast<size_t>(site.size)) {
    if (std::set(site.hosts.begin(), site.hosts.end()).size() > 1)
      throw ConfigError("backend sockets: all ranks must be on one host");
    const Deadline deadline(site.timeout);
    const auto key = [&](int rank) { return site.name + "/" + std::to_string(rank); };

    const Socket listener = make_socket();
    sockaddr_un address{.sun_family = AF_UNIX, .sun_path = {}};
    socklen_t length = sizeof(address.sun_family);  // no name: choose one
    check("bind", bind(listener.get(), reinterpret_cast<sockaddr*>(&address), length));
    check("listen", listen(listener.get(), site.size));
    length = sizeof(address);
    check("getsockname",
          getsockname(listener.get(), reinterpret_cast<sockaddr*>(&address), &length));
    site.store->set(key(site.rank), {reinterpret_cast<const char*>(&address), length});

    for (int peer = 0; peer < site.rank; ++peer) {
      const std::string there = site.store->get(key(peer), deadline);
      peers_[static_cast<size_t>(peer)] = make_socket();
      check("connect", connect(socket_of(peer), reinterpret_cast<const sockaddr*>(there.data()),
                               static_cast<socklen_t>(there.size())));
      send(peer, std::as_bytes(std::span(&site.rank, 1)));  // who I am
    }
    limit_waits(listener, site.timeout);
    for (int peer = site.rank + 1; peer < site.size; ++peer) {
      Socket socket(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
      check("accept", socket.get());
      limit_waits(socket, site.timeout);
      int who = -1;
      if (::recv(socket.get(), &who, sizeof(who), MSG_WAITALL) != sizeof(who) || who <= site.rank ||
          who >= site.size || socket_of(who) >= 0)
        throw CommError("backend sockets: an unknown process has connected");
      limit_waits(socket, milliseconds{0});  // from here on abort() ends a wait
      peers_[static_cast<size_t>(who)] = std::move(socket);
    }
  }

  void send(int peer, std::span<const std::byte> data) override {
    while (!data.empty()) {
      // No signal where the peer is gone: an error, which says so.
      const ssize_t sent = ::send(socket_of(peer), data.data(), data.size(), MSG_NOSIGNAL);
      if (sent < 0 && errno == EINTR) continue;
      check("send", sent);
      data = data.subspan(static_cast<size_t>(sent));
    }
  }

  void recv(int peer, std::span<std::byte> data) override {
    while (!data.empty()) {
      const ssize_t received = ::recv(socket_of(peer), data.data(), data.size(), MSG_WAITALL);
      if (received < 0 && errno == EINTR) continue;
      check("recv", received);
      if (received == 0) throw CommError("backend sockets: the peer has closed its end");
      data = data.subspan(static_cast<size_t>(received));
    }
  }

  void abort() noexcept override {
    for (const Socket& peer : peers_) shutdown(peer.get(), SHUT_RDWR);
  }

 private:
  static Socket make_socket() {
    Socket made(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    check("socket", made.get());
    return made;
  }
  static void check(const char* call, ssize_t result) {
    if (result < 0) throw SystemError(std::string("backend sockets: ") + call, errno);
  }
  // 0: no limit.
  static void limit_waits(const Socket& socket, milliseconds timeout) {
    const auto seconds = (timeout.count() + 999) / 1000;
    const timeval limit{.tv_sec = seconds, .tv_usec = 0};
    check("setsockopt", setsockopt(socket.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit)));
  }
  int socket_of(int peer) const { return peers_[static_cast<size_t>(peer)].get(); }

  std::vector<Socket> peers_;  // by rank; none for this one
};

int main() {
  comm::register_backend(
      "sockets", [](const comm::TransportSite& site) { return std::make_unique<Sockets>(site); });
  const comm::Group world = comm::init({.backend = "sockets", .check = true});
  const bool speaks = world.rank() == 0;

  // What every backend must do. Each check has a group of its own, because some break theirs.
  bool hold = true;
  for (const comm::ConformanceCheck& check : comm::conformance_checks()) {
    try {
      check.run(world.split(0, world.rank()));
    } catch (const std::exception& failure) {
      std::cerr << "rank " << world.rank() << ": " << check.name << ": " << failure.what() << "\n";
      hold = false;
    }
  }
  if (speaks)
    std::cout << world.size() << " ranks over " << world.backend() << ": "
              << (hold ? "all checks hold\n" : "some checks do not hold\n");

  // The gradient of rank r is r + 1.
  torch::nn::Linear model(torch::nn::LinearOptions(1, 1).bias(false));
  auto ddp = parallel::ddp(*model, world);
  ddp.forward(torch::full({1, 1}, world.rank() + 1.0)).sum().backward();
  if (speaks)
    std::cout << "ddp over " << world.backend()
              << " averages gradients: " << model->weight.grad().item<double>() << "\n";
  return hold ? 0 : 1;
}
