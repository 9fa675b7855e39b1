// SPDX-License-Identifier: Apache-2.0
// Which replica may take its next step, and whose gradients are due.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <vector>

#include "lockstep/parallel/data/data_parallel.h"

namespace lockstep::parallel::detail {

// A replica takes steps: begin, compute gradients, finish, and, once they are in the model,
// applied. Thread safe; torch plays no part in it.
class ReplicaPace {
 public:
  ReplicaPace(size_t replicas, SyncMode mode);

  // Takes effect at once, except that Synchronous is left only by adopt_mode(): gradients of some
  // replicas may be waiting for the others'.
  void set_mode(SyncMode mode);
  SyncMode mode() const;     // as last set
  bool synchronous() const;  // the mode in effect
  RunStats stats() const;

  void start();  // a new run, with all counts at zero
  void stop();   // no replica waits any longer, and none begins

  // Waits until the replica may take its next step; false if the run was stopped.
  bool begin(size_t replica);
  // The gradients of `replica` are there. Returns the replicas whose gradients the caller is to
  // apply together, in order: its own, or, where steps are taken together, none or all.
  std::vector<size_t> finish(size_t replica);
  void applied(const std::vector<size_t>& replicas);
  // For the caller that applies the gradients of all replicas: none of them is computing.
  void adopt_mode();

 private:
  enum class State { computing, holding, applying };

  int64_t slowest() const;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  SyncMode requested_, active_;
  bool stopped_ = false;
  std::vector<State> states_;
  RunStats stats_;
};

}  // namespace lockstep::parallel::detail
