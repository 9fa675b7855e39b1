// SPDX-License-Identifier: Apache-2.0
// Schedules of one chunk per rank. p ranks, m micro-batches, rank r.
#include <algorithm>

#include "lockstep/schedule/generate/generators.h"
#include "lockstep/schedule/generate/order.h"

namespace lockstep::schedule::detail {

void round_robin(Schedule& schedule) {
  for (int r = 0; r < schedule.ranks; ++r) {
    Order order(schedule, r);
    for (int i = 0; i < schedule.microbatches; ++i) {
      order.forward(i);
      order.backward(i);
    }
  }
}

void sequential(Schedule& schedule) {
  for (int r = 0; r < schedule.ranks; ++r) {
    Order order(schedule, r);
    for (int i = 0; i < schedule.microbatches; ++i) order.forward(i);
    for (int i = schedule.microbatches; i-- > 0;) order.backward(i);
  }
}

void gpipe(Schedule& schedule) {
  for (int r = 0; r < schedule.ranks; ++r) {
    Order order(schedule, r);
    for (int i = 0; i < schedule.microbatches; ++i) order.forward(i);
    for (int i = 0; i < schedule.microbatches; ++i) order.backward(i);
  }
}

void one_f_one_b(Schedule& schedule) {
  const int p = schedule.ranks, m = schedule.microbatches;
  for (int r = 0; r < p; ++r) {
    Order order(schedule, r);
    const int warmup = std::min(p - r - 1, m);
    for (int i = 0; i < warmup; ++i) order.forward(i);
    for (int i = 0; i < m; ++i) {
      if (i + warmup < m) order.forward(i + warmup);
      order.backward(i);
    }
  }
}

// 1F1B, with weight gradients r micro-batches late: they fill the time in which rank r waits for
// the gradients of the last micro-batches, and every rank holds p micro-batches.
void zb_h1(Schedule& schedule) { zb_1p(schedule, schedule.ranks); }

// Enough forwards to begin with that no rank waits for its first gradient; weight gradients 2r
// micro-batches late.
void zb_h2(Schedule& schedule) {
  const int p = schedule.ranks, m = schedule.microbatches;
  for (int r = 0; r < p; ++r) {
    Order order(schedule, r);
    const int warmup = std::min(2 * (p - r) - 1, m);
    for (int i = 0; i < warmup; ++i) order.forward(i);
    for (int i = 0; i < m; ++i) {
      order.input(i);
      if (order.pending() > 2 * r) order.weight();
      if (i + warmup < m) order.forward(i + warmup);
    }
    order.all_weights();
  }
}

}  // namespace lockstep::schedule::detail
