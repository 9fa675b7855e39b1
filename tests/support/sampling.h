// SPDX-License-Identifier: Apache-2.0
// `make test` takes samples of what `make check-all` tests whole.
#pragma once

#include <cstdlib>

namespace lockstep::test {

inline bool tests_all() {
  static const bool all = std::getenv("LOCKSTEP_TEST_ALL") != nullptr;
  return all;
}

}  // namespace lockstep::test
