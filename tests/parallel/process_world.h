// SPDX-License-Identifier: Apache-2.0
// The group of a program whose ranks are processes, on the backend that LOCKSTEP_TEST_BACKEND
// names.
#pragma once

#include <cstdlib>

#include "lockstep/comm/group.h"

namespace lockstep::test {

inline const comm::Group& world() {
  static const comm::Group group = comm::init({.backend = std::getenv("LOCKSTEP_TEST_BACKEND")
                                                              ? std::getenv("LOCKSTEP_TEST_BACKEND")
                                                              : "auto"});
  return group;
}

inline int micro_batches() { return world().size() == 3 ? 6 : 8; }

}  // namespace lockstep::test
