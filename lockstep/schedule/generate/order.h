// SPDX-License-Identifier: Apache-2.0
// Writing down the actions of one rank. Private: not installed.
#pragma once

#include <cstddef>
#include <vector>

#include "lockstep/schedule/schedule.h"

namespace lockstep::schedule::detail {

// Appends to one rank's actions.
class Order {
 public:
  Order(Schedule& schedule, int rank) : actions_(schedule.actions[rank]) {}

  void forward(int microbatch, int chunk = 0) { add(Op::forward, microbatch, chunk); }
  void backward(int microbatch, int chunk = 0) { add(Op::backward, microbatch, chunk); }
  void input(int microbatch, int chunk = 0) {
    add(Op::backward_input, microbatch, chunk);
    inputs_.push_back(actions_.back());
  }
  // The weight gradient of the oldest input gradient that has none yet.
  void weight() {
    const Action& oldest = inputs_.at(weights_++);
    add(Op::backward_weight, oldest.microbatch, oldest.chunk);
  }
  void all_weights() {
    while (pending() > 0) weight();
  }
  int pending() const { return static_cast<int>(inputs_.size() - weights_); }
  void add(Op op, int microbatch, int chunk) { actions_.push_back({op, microbatch, chunk}); }

 private:
  std::vector<Action>& actions_;
  std::vector<Action> inputs_;
  size_t weights_ = 0;
};

}  // namespace lockstep::schedule::detail
