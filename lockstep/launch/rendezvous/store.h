// SPDX-License-Identifier: Apache-2.0
// A key-value rendezvous: how ranks find each other before they can communicate.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>

#include "lockstep/core/clock.h"

namespace lockstep::launch {

// Thread safe. Keys are set once by convention; a later set replaces the value.
class Store {
 public:
  virtual ~Store() = default;
  virtual void set(const std::string& key, const std::string& value) = 0;
  // Waits until the key is set. Throws TimeoutError naming the key at the deadline.
  virtual std::string get(const std::string& key, const Deadline& deadline) = 0;
  virtual std::optional<std::string> find(const std::string& key) = 0;
  // Adds to a counter that starts at 0 and returns the new value. The counter is stored as decimal
  // text.
  virtual int64_t add(const std::string& key, int64_t amount) = 0;
  virtual bool remove(const std::string& key) = 0;
};

// The key under which a store that watches its clients says that a rank's connection ended without
// a good-bye. Its value says how, in words.
std::string lost_key(int rank);

// How the clients of a space came together, or why they did not: a word for the kind, then what it
// says. The first that knows sets it: the rendezvous itself where it refuses a rank or a client
// is lost before that; all wait for it.
//   met TEXT       all are there and agree; what TEXT says is theirs
//   refused WHY    they disagree, or one came twice
//   lost N WHY     number N went away before all were there
//   late WHY       some did not come in time
inline constexpr const char* kJoinedKey = "joined";
// What it says after "met"; else throws ConfigError, PeerLost or TimeoutError with the reason.
std::string join_result(const std::string& value);

// For ranks that are threads of one process, and inside the rendezvous server.
class LocalStore final : public Store {
 public:
  void set(const std::string& key, const std::string& value) override;
  std::string get(const std::string& key, const Deadline& deadline) override;
  std::optional<std::string> find(const std::string& key) override;
  int64_t add(const std::string& key, int64_t amount) override;
  bool remove(const std::string& key) override;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::string> values_;
};

}  // namespace lockstep::launch
