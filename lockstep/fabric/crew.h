// SPDX-License-Identifier: Apache-2.0
// Threads that share the work of a rank's large operations while the rank waits for them. Who waits
// does not compute, so its other threads are idle; what overlaps with computation stays with the
// one thread that drives it.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <stop_token>
#include <thread>
#include <vector>

namespace lockstep::fabric {

// Thread safe, but run() is called by one thread at a time.
class Crew {
 public:
  // Adds up to `helpers` threads while it lives, also to what run() does already.
  class Loan {
   public:
    Loan(Crew& crew, int helpers);
    ~Loan();
    Loan(const Loan&) = delete;
    Loan& operator=(const Loan&) = delete;

   private:
    Crew& crew_;
  };

  // Calls part(i) for all i in [0, parts), on this thread and on those that are lent, and returns
  // when all have ended. Throws what the first part that failed has thrown; the others are left
  // out.
  void run(int64_t parts, const std::function<void(int64_t)>& part);

 private:
  void call_helpers();
  void help(const std::stop_token& stop, int number);
  void do_next(std::unique_lock<std::mutex>& lock);

  std::mutex mutex_;  // guards what follows
  int loans_ = 0, lent_ = 0;
  int64_t next_ = 0, parts_ = 0;
  int running_ = 0;  // parts on helpers
  std::exception_ptr failure_;
  const std::function<void(int64_t)>* part_ = nullptr;
  std::condition_variable_any work_;
  std::condition_variable done_;
  std::vector<std::jthread> helpers_;
};

}  // namespace lockstep::fabric
