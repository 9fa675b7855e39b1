// SPDX-License-Identifier: Apache-2.0
#include "lockstep/schedule/schedule.h"

#include "lockstep/core/error.h"

namespace lockstep::schedule {

int Pipeline::stage(int rank, int chunk) const {
  if (order == StageOrder::v && chunk == 1) return 2 * ranks - 1 - rank;
  return chunk * ranks + rank;
}

Place Pipeline::place(int stage) const {
  if (order == StageOrder::v && stage >= ranks) return {2 * ranks - 1 - stage, 1};
  return {stage % ranks, stage / ranks};
}

int Pipeline::peer(int rank, const Action& action) const {
  const bool next = action.op == Op::send_activation || action.op == Op::recv_gradient;
  const bool previous = action.op == Op::recv_activation || action.op == Op::send_gradient;
  check(next || previous, "only sends and receives have a peer");
  const int other = stage(rank, action.chunk) + (next ? 1 : -1);
  check(other >= 0 && other < stages(), "the ends of a pipeline have no peer");
  return place(other).rank;
}

}  // namespace lockstep::schedule
