// SPDX-License-Identifier: Apache-2.0
// Whether all ranks have called the same thing, and the message when they have not.
#pragma once

#include <functional>
#include <string>

#include "lockstep/fabric/operation.h"

namespace lockstep::fabric {

// What every rank of a group says of one collective. Counts are the rank's send counts, then its
// receive counts.
struct Claims {
  std::string group;
  uint64_t sequence;
  int size;
  std::function<const Signature&(int rank)> signature;
  std::function<const int64_t*(int rank)> counts;
};

// Throws MismatchError that shows all sides, the same on every rank.
void check_agreement(const Claims& claims);

// The same for a message: what rank `receiver` asked for, and what its sender has sent.
void check_message(const std::string& group, int receiver, const Signature& asked,
                   const Signature& sent);

}  // namespace lockstep::fabric
