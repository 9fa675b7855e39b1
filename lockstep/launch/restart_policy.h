// SPDX-License-Identifier: Apache-2.0
// Whether a job that has failed is started again, and when.
#pragma once

#include <deque>
#include <optional>
#include <string>
#include <string_view>

#include "lockstep/core/clock.h"
#include "lockstep/launch/outcome.h"

namespace lockstep::launch {

// Of several nodes, node 0 asks for all. Time is that of the outcomes.
class RestartPolicy {
 public:
  explicit RestartPolicy(int max_restarts) : max_restarts_(max_restarts) {}

  struct Decision {
    bool restart = false;
    milliseconds wait{0};  // before it
    std::string text;      // why, or why not; empty where there is nothing to say
    int code = 0;          // what the launcher exits with, where it is not the outcome's
  };
  // Called once for each end. A restart makes progress if it reaches a step that none before it has
  // reached, or, where programs do not count steps, if it runs for a minute.
  Decision after(const Outcome& outcome);

 private:
  const int max_restarts_;
  milliseconds now_{0};
  std::deque<milliseconds> restarts_;  // of the last hour
  int64_t best_step_ = -1;
  int starts_ = 0, without_progress_ = 0;
};

// In a form that the launchers of several nodes can exchange.
std::string pack(const RestartPolicy::Decision& decision);
std::optional<RestartPolicy::Decision> unpack_decision(std::string_view text);

}  // namespace lockstep::launch
