// SPDX-License-Identifier: Apache-2.0
// Whether the processes behind a group's ranks are alive.
#pragma once

#include <string>
#include <vector>

#include "lockstep/core/fd.h"
#include "lockstep/fabric/board.h"

namespace lockstep::comm::shm {

// Used by one thread at a time.
class Liveness {
 public:
  explicit Liveness(std::shared_ptr<fabric::Board> board);
  // Empty while the rank's process runs, or if it has not joined yet; else how it ended.
  std::string death_of(int rank);

 private:
  std::shared_ptr<fabric::Board> board_;
  std::vector<Fd> processes_;
};

}  // namespace lockstep::comm::shm
