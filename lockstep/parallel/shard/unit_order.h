// SPDX-License-Identifier: Apache-2.0
// In which order units are used, as it was the last time. Private: not installed.
#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <utility>
#include <vector>

namespace lockstep::parallel::detail {

enum class Phase { forward, no_grad, backward };

// A unit is visited from the first operator that uses it to the last before another's. What
// follows a visit is remembered by the visit and the one before it, so that passes of different
// kinds (training, evaluation, several forwards before one backward) are told apart by themselves,
// and a changed order is learned as it happens.
class UnitOrder {
 public:
  // An operator uses a unit. Returns whether that begins a visit.
  bool use(Phase phase, size_t unit);
  // Nothing follows on the current visit: the optimizer's step comes between.
  void end_pass();

  // The units that followed last time, nearest first, at most `depth`; without repetitions, and
  // without the current one.
  std::vector<size_t> ahead(int depth) const;
  // What followed last time is a visit to the same unit: the last of a forward is the first of its
  // backward.
  bool stays() const;
  // As many operators have used the unit as in the last visit like this one.
  bool visit_is_over() const;
  // At least as many, in a pass with or without gradients; also where there was no such visit.
  bool visit_may_be_over() const;

 private:
  using Visit = std::pair<Phase, size_t>;
  using Context = std::pair<std::optional<Visit>, Visit>;  // the visit before, and this one
  struct Experience {
    std::optional<Visit> next;
    size_t operators = 0;
  };

  std::map<Context, Experience> experience_;
  std::optional<Visit> before_, current_;
  size_t operators_ = 0;
};

}  // namespace lockstep::parallel::detail
