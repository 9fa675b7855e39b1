// SPDX-License-Identifier: Apache-2.0
// Tells the rendezvous what this rank is doing, so that others can say who is late and where.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "lockstep/fabric/board.h"
#include "lockstep/launch/rendezvous/store.h"

namespace lockstep::comm::detail {

struct World;

// For backends without shared memory. Posts changes from a thread of its own, a few times a second:
// no operation waits for it. Thread safe.
class ActivityReporter {
 public:
  explicit ActivityReporter(std::shared_ptr<launch::Store> store);
  ~ActivityReporter();

  using Word = std::shared_ptr<std::atomic<uint64_t>>;  // a packed fabric::Activity
  // Reports under `key` from now on, until the group lets go of the word.
  Word watch(const std::string& key);

  static constexpr milliseconds kInterval{200};

 private:
  void run(std::stop_token stop);

  std::shared_ptr<launch::Store> store_;
  std::mutex mutex_;
  std::condition_variable_any wake_;
  std::map<std::string, std::pair<std::weak_ptr<std::atomic<uint64_t>>, uint64_t>>
      words_;  // word, last reported
  std::jthread thread_;
};

// The job's own, made by the first call.
const std::shared_ptr<ActivityReporter>& reporter_of(World& world);

}  // namespace lockstep::comm::detail
