// SPDX-License-Identifier: Apache-2.0
// The rendezvous of a job over TCP: a key-value server that first asks for the job's token, and
// its client.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "lockstep/core/clock.h"
#include "lockstep/launch/rendezvous/store.h"
#include "lockstep/launch/rendezvous/token.h"

namespace lockstep::launch {

// Launchers meet in this generation; its keys outlive restarts of the ranks.
constexpr int64_t kControlGeneration = -1;

// Serves from a thread of its own until it is destroyed. Thread safe.
class RendezvousServer {
 public:
  // How many will come; 0: as many as the first of them says. Who counts otherwise is refused.
  // `single`: for one incarnation; a rank that comes a second time is told to try again later,
  // because the next incarnation has a server of its own.
  struct Expected {
    int ranks = 0, nodes = 0;
    bool single = false;
  };
  // Listens on exactly `bind_address` ("host:port"; port 0 lets the kernel choose). Throws
  // ConfigError for a bad address or a token that is empty or above 128 bytes, SystemError where
  // the port cannot be had.
  explicit RendezvousServer(const std::string& token,
                            const std::string& bind_address = "127.0.0.1:0");
  RendezvousServer(const std::string& token, const std::string& bind_address,
                   const Expected& expected);
  ~RendezvousServer();
  RendezvousServer(const RendezvousServer&) = delete;
  RendezvousServer& operator=(const RendezvousServer&) = delete;

  // Where it listens, with the real port.
  const std::string& address() const;

  // From now on only ranks of this generation are let in; keys and connections of the earlier one
  // are gone. A new server is in generation 0. `ranks`: how many will come, as in Expected.
  void begin_generation(int64_t generation, int ranks);

  // Sets lost_key(rank) in the rank's latest incarnation and in all that follow in this generation:
  // for a launcher that saw a rank end and knows how.
  void mark_lost(int rank, const std::string& how);

  // Waits until all ranks have left, one is lost, or the deadline passes.
  void wait_until_left(const Deadline& deadline);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

// Who a client is. Rank -1 is not a rank: it may use the store of the incarnation that it names but
// no rank misses it. A rank joins the next incarnation after the one it joined before; each has
// keys of its own.
struct Identity {
  int rank = -1;
  int world_size = 0;
  int64_t generation = 0;
  int64_t incarnation = 0;
};

// Every call but get() is one request on one connection, answered within 30 s or a TimeoutError; a
// get() that has to wait does so on a connection of its own, so other threads' calls pass it. A
// server that went away is a CommError.
class RendezvousClient final : public Store {
 public:
  // `address` is "host:port" or several with commas between them, of which the first that answers
  // is taken. Tries until the deadline, then throws TimeoutError with the time since `start`, when
  // a caller that tries several times began. Throws ConfigError where the server refuses: a wrong
  // token, a rank that is taken, another world size, an earlier generation; CommError where another
  // service answers.
  RendezvousClient(const std::string& address, const std::string& token, const Identity& identity,
                   const Deadline& deadline, Clock::time_point start = Clock::now());
  // Says good-bye, without waiting: a rank that ends so is not lost.
  ~RendezvousClient() override;
  RendezvousClient(const RendezvousClient&) = delete;
  RendezvousClient& operator=(const RendezvousClient&) = delete;

  // The numeric addresses of the two ends of the connection: by which this host reaches the server,
  // and the server's.
  std::string local_address() const;
  std::string server_address() const;

  // Keys have at most 4 KiB and values at most 16 MiB (ConfigError).
  void set(const std::string& key, const std::string& value) override;
  std::string get(const std::string& key, const Deadline& deadline) override;
  std::optional<std::string> find(const std::string& key) override;
  int64_t add(const std::string& key, int64_t amount) override;
  bool remove(const std::string& key) override;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

// For a program that `lockstep run` started: reads LOCKSTEP_RENDEZVOUS, the token and
// LOCKSTEP_GENERATION. Throws ConfigError where they are missing, and as the client's constructor
// does.
std::unique_ptr<RendezvousClient> connect_from_environment(int rank, int world_size,
                                                           const Deadline& deadline);

}  // namespace lockstep::launch
