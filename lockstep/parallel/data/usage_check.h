// SPDX-License-Identifier: Apache-2.0
// Parameters that a step leaves without a gradient, where that is a mistake. Private: not
// installed.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "lockstep/parallel/data/bucket.h"
#include "lockstep/parallel/gradients/backward_rounds.h"

namespace lockstep::parallel::detail {

// What the error says. `names`: of the parameters, at least one; `ranks`: where it is so.
std::string wrong_gradients(const std::vector<std::string>& names, const char* what,
                            const std::vector<int>& ranks, int world, const char* rule);

inline constexpr const char* kNoGradient = "got no gradient";
inline constexpr const char* kMayBeUnused =
    "if steps may leave parameters unused, set find_unused_parameters";

// On a group of one, where no gradient is averaged: the error that several ranks would get.
class UsageCheck final : public BackwardRounds::Listener,
                         public std::enable_shared_from_this<UsageCheck> {
 public:
  explicit UsageCheck(std::vector<Parameter> parameters)
      : parameters_(std::move(parameters)), has_gradient_(parameters_.size(), false) {}

  // As those of Reducer. start() does nothing where it was called before, unless restart() was.
  void start();
  void restart() { listens_ = false; }
  void begin_backward();
  void check_now();
  void set_syncing(bool syncing) { syncing_ = syncing; }
  void drop_accumulated() { has_gradient_.assign(parameters_.size(), false); }

 private:
  void on_gradient(size_t index, bool is_new) override;
  bool open_round(bool in_backward) override { return !in_backward || syncing_; }
  void close_round() override;
  void abandon_round() override {}

  const std::vector<Parameter> parameters_;
  std::vector<char> has_gradient_;  // since the last step
  bool syncing_ = true;
  bool listens_ = false;
  BackwardRounds rounds_;
};

}  // namespace lockstep::parallel::detail
