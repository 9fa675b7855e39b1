// SPDX-License-Identifier: Apache-2.0
// Where the values of a flat's parameters are between their uses. Private: not installed.
#pragma once

#include <functional>
#include <memory>

#include "lockstep/parallel/flat/copy_thread.h"
#include "lockstep/parallel/flat/flat_shard.h"
#include "lockstep/parallel/flat/step_memory.h"

namespace lockstep::parallel::detail {

using layout::ParameterState;

struct ShardCounts {
  int64_t all_gathers = 0;
  int64_t reduce_scatters = 0;
  int64_t all_reduces = 0;
  int64_t fetched_ahead = 0;  // of the all-gathers
};

// What all flats of an engine share.
struct FlatEnvironment {
  GatherMemory gather_memory;
  GradientMemory gradient_memory;
  CopyThread& copy_thread;
  std::function<void()> evict;  // what was fetched and is not used yet gives way
  bool one_sided = false;       // some flat's shards are read without the help of their ranks
  ShardCounts counts = {};
  // Sees a flat's gradients before they are reduced, with its members' names; empty: none.
  std::function<void(const at::Tensor& flat, const std::vector<std::string>& names)> observe = {};
};

class Residence {
 public:
  virtual ~Residence() = default;
  Residence(const Residence&) = delete;
  Residence& operator=(const Residence&) = delete;

  enum class When { ahead, now };
  // now: the parameters are in the model's memory when this returns. ahead: they may be on their
  // way. Returns whether they had to be brought.
  virtual bool acquire(When when) = 0;
  // They are not needed until the next acquire().
  virtual void release() = 0;
  // The shard has new values: those that were brought are dropped, and others may read the new.
  virtual void publish() = 0;

  ParameterState state() const { return state_; }

 protected:
  explicit Residence(ParameterState state) : state_(state) {}
  ParameterState state_;
};

// The one that the flat's plan asks for.
std::unique_ptr<Residence> make_residence(FlatParameter& parameter, FlatShard& shard,
                                          FlatEnvironment& environment);

}  // namespace lockstep::parallel::detail
