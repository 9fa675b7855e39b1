// SPDX-License-Identifier: Apache-2.0
// Which rank left the order that all ranks of a group keep.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "lockstep/flight/flight.h"

namespace lockstep::flight {

struct Culprit {
  enum class Kind { mismatch, missing, deadlock };
  Kind kind = Kind::missing;
  int rank = -1;
  std::vector<int> waiting;  // ranks that wait for it, directly
  Operation operation;       // that they wait in, or that it should have called
  int64_t waited_ns = 0;     // the longest of them
  std::string text;          // one line
};

// The first rank that called something else than the others, or that others wait for while it
// waits for none. Nothing where all is well, or where only ranks that are not here can be to blame.
// `patient`: only waits are looked at that are longer than the patience of their operation and ten
// times what it usually takes.
std::optional<Culprit> find_culprit(const std::vector<Flight>& flights, bool patient = false);

// One line on which rank left the common order first, in which operation, and what it did instead.
std::string verdict(const std::vector<Flight>& flights);

}  // namespace lockstep::flight
