// SPDX-License-Identifier: Apache-2.0
// Clients of a rendezvous for tests: proper ones, and ones made by hand.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/launch/rendezvous/hmac.h"
#include "lockstep/launch/rendezvous/rendezvous.h"
#include "lockstep/launch/rendezvous/socket.h"
#include "lockstep/launch/rendezvous/wire.h"

namespace lockstep::launch {

inline const std::string kToken = "0123456789abcdef";

inline Deadline in(int ms) { return Deadline(milliseconds{ms}); }

inline RendezvousClient client(const RendezvousServer& server, int rank = -1, int world_size = 0,
                               int64_t generation = 0) {
  return {server.address(), kToken, {rank, world_size, generation}, in(20'000)};
}

template <class Exception, class Call>
std::string message_of(Call call) {
  try {
    call();
  } catch (const Exception& failure) {
    return failure.what();
  }
  ADD_FAILURE() << "no exception of the expected type";
  return {};
}

// A connection that knows nothing of the protocol.
inline Fd raw(const RendezvousServer& server, const std::string& bytes) {
  Fd fd = connect_socket({parse_host_port(server.address(), "test")}, in(20'000));
  write_full(fd, std::as_bytes(std::span(bytes)), in(20'000));
  return fd;
}

inline std::string read_bytes(const Fd& fd, size_t count) {
  std::string bytes(count, '\0');
  EXPECT_TRUE(read_full(fd, std::as_writable_bytes(std::span(bytes)), in(20'000)));
  return bytes;
}

inline void write_bytes(const Fd& fd, const std::string& bytes) {
  write_full(fd, std::as_bytes(std::span(bytes)), in(20'000));
}

// A client by hand, which must still prove that it knows the token.
struct Stranger {
  Stranger(const RendezvousServer& server, const wire::Hello& hello)
      : opening{wire::make_nonce(), hello}, fd(raw(server, wire::pack(opening))) {
    nonce = read_bytes(fd, 5 + wire::kNonceSize).substr(5);
  }
  wire::Opening opening;
  Fd fd;
  std::string nonce;
};

// A client that ends without a good-bye.
inline Fd joined(const RendezvousServer& server, const wire::Hello& hello) {
  Stranger client(server, hello);
  write_bytes(client.fd, wire::client_proof(kToken, client.opening, client.nonce));
  read_bytes(client.fd, 5 + 8 + kHmacSize);
  return std::move(client.fd);
}

// How many bytes come before the server closes the connection.
inline size_t bytes_until_closed(const Fd& fd) {
  size_t total = 0;
  std::byte byte{};
  try {
    while (read_full(fd, std::span(&byte, 1), in(20'000))) ++total;
  } catch (const SystemError&) {  // a reset is an end too
  }
  return total;
}

}  // namespace lockstep::launch
