// SPDX-License-Identifier: Apache-2.0
// Where each rank of a pipeline is, and which of them holds up the others. Private: not installed.
//
// A message may have to wait for all that other ranks compute first, so how long one waits says
// nothing: a pipeline is stuck when the rank at the end of the chain (rank 3 waits for rank 2,
// which waits for rank 1) has not moved for the timeout. Every rank tells the job's store where it
// is, and one that waits looks there.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/comm/control/job_store.h"
#include "lockstep/comm/group.h"
#include "lockstep/schedule/lower.h"

namespace lockstep::parallel::detail {

// What a rank tells the others, in one word.
struct Standing {
  static constexpr int kNone = -1, kAll = -2;

  uint64_t run = 0;       // programs begun
  size_t index = 0;       // actions done of the last one; the next is running
  int waits_for = kNone;  // a rank's message, or all ranks

  uint64_t pack() const;
  static Standing unpack(uint64_t word);
};

class Progress {
 public:
  // `stuck` is called, by a thread of its own, with the reason why this rank need not wait any
  // longer; it ends the waits.
  Progress(const comm::Group& group, std::function<void(const std::string&)> stuck);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // By the thread that computes: a program, and which of its actions. The program must stay until
  // end().
  void begin(const schedule::Program& program);
  void reach(size_t index);
  void end();
  // While one is alive, this rank waits.
  class [[nodiscard]] Waiting {
   public:
    Waiting(Progress& progress, int peer) : progress_(progress) { progress_.set_waiting(peer); }
    ~Waiting() { progress_.set_waiting(Standing::kNone); }
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;

   private:
    Progress& progress_;
  };

  // TimeoutError that names the rank that is stuck, where one was found.
  std::exception_ptr failure() const;

 private:
  // What this rank has seen of another: the word, and since when it is the same.
  struct Seen {
    uint64_t word = 0;
    Clock::time_point since = {};
  };

  void set_waiting(int peer);
  void tell();
  void watch(const std::stop_token& stop);
  Standing look(int rank);
  int behind(const Standing& waiting);
  // Whom this rank waits for in the end, last; the ranks between first.
  std::vector<int> chain(const Standing& mine);
  bool was_sent(int rank, const Standing& standing);
  std::string describe(const std::vector<int>& chain);
  std::string describe(int rank, const Standing& standing) const;

  const comm::Group group_;
  const std::function<void(const std::string&)> stuck_;
  comm::PublishedWord word_;  // packed
  Standing mine_;             // of the thread that computes
  std::map<int, Seen> seen_;  // of the watching thread

  std::atomic<Clock::time_point> waits_since_ = {};

  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable_any wake_;
  const schedule::Program* program_ = nullptr;
  std::exception_ptr failure_;
  std::jthread thread_;
};

}  // namespace lockstep::parallel::detail
