// SPDX-License-Identifier: Apache-2.0
// Which places of an elastic job have ranks. A place is one of the ranks that a node can have, or
// one of the nodes that a job can have. One that has failed is left out for a time.
#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "lockstep/core/clock.h"

namespace lockstep::launch {

struct Bounds {
  int min = 1, max = 1;
  bool is_elastic() const { return min < max; }
};

// "N", which is N:N and may be any number, or "MIN:MAX", where 1 <= MIN <= MAX. Throws ConfigError
// naming the option, its values and the rule.
Bounds parse_bounds(const std::string& text, const std::string& option);

struct StartSize {
  int size = 0;
  std::string layout = {};  // in words; empty: the program has none
};
// What to start on so many places. A number that is missing cannot be used; where there is none at
// all, every number can.
using StartSizes = std::map<int, StartSize>;

class Places {
 public:
  Places(Bounds bounds, std::chrono::seconds patience, StartSizes sizes);

  // A place that fails for the n-th time is left out for 2^(n - 1) times the patience, at most an
  // hour; unless too few are left without it: then all that are out come back.
  void fail(const std::vector<int>& places, Clock::time_point now);
  // A place that is absent cannot be used, whether it has failed or not. At first all are here.
  void set_present(int place, bool present);

  struct Start {
    std::vector<int> places = {};  // empty: too few are left
    std::string layout = {};
    // When a larger start may be possible, with places that are here.
    std::optional<Clock::time_point> grows_at = std::nullopt;
  };
  Start next(Clock::time_point now) const;

 private:
  std::vector<int> usable(Clock::time_point now) const;
  std::optional<StartSize> size_for(size_t places) const;

  const Bounds bounds_;
  const std::chrono::seconds patience_;
  const StartSizes sizes_;
  std::set<int> absent_;
  std::map<int, int> failures_;
  std::map<int, Clock::time_point> out_until_;
};

}  // namespace lockstep::launch
