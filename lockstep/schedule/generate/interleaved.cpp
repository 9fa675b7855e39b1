// SPDX-License-Identifier: Apache-2.0
// Schedules of several chunks per rank whose stages loop over the ranks. p ranks, m micro-batches,
// v chunks, rank r.
#include <algorithm>
#include <vector>

#include "lockstep/schedule/generate/generators.h"
#include "lockstep/schedule/generate/order.h"

namespace lockstep::schedule::detail {
namespace {

struct Turn {
  int microbatch, chunk;
};

// The order of forwards: `group` micro-batches through chunk 0, the same through chunk 1, and so
// on; then the next group.
std::vector<Turn> turns(const Pipeline& pipeline, int group) {
  std::vector<Turn> table;
  for (int low = 0; low < pipeline.microbatches; low += group) {
    const int high = std::min(low + group, pipeline.microbatches);
    for (int chunk = 0; chunk < pipeline.chunks; ++chunk) {
      for (int i = low; i < high; ++i) table.push_back({i, chunk});
    }
  }
  return table;
}

}  // namespace

void interleaved(Schedule& schedule, int group) {
  const int p = schedule.ranks, v = schedule.chunks;
  const auto table = turns(schedule, group);
  const int total = static_cast<int>(table.size());
  for (int r = 0; r < p; ++r) {
    Order order(schedule, r);
    const int warmup = std::min(2 * (p - r - 1) + (v - 1) * group, total);
    for (int k = 0; k < warmup; ++k) order.forward(table[k].microbatch, table[k].chunk);
    for (int k = 0; k < total; ++k) {
      if (k + warmup < total) {
        order.forward(table[k + warmup].microbatch, table[k + warmup].chunk);
      }
      order.backward(table[k].microbatch, v - 1 - table[k].chunk);
    }
  }
}

void looped_bfs(Schedule& schedule) {
  const int m = schedule.microbatches, v = schedule.chunks;
  for (int r = 0; r < schedule.ranks; ++r) {
    Order order(schedule, r);
    for (int chunk = 0; chunk < v; ++chunk) {
      for (int i = 0; i < m; ++i) order.forward(i, chunk);
    }
    for (int chunk = v; chunk-- > 0;) {
      for (int i = m; i-- > 0;) order.backward(i, chunk);
    }
  }
}

// Half the extra warm-up of interleaved, because gradients come back sooner when the weight
// gradients, r turns late, do not stand in their way.
void zb_1p(Schedule& schedule, int group) {
  const int p = schedule.ranks, v = schedule.chunks;
  const auto table = turns(schedule, group);
  const int total = static_cast<int>(table.size());
  for (int r = 0; r < p; ++r) {
    Order order(schedule, r);
    const int warmup = std::min((p - r - 1) + (v - 1) * group, total);
    for (int k = 0; k < warmup; ++k) order.forward(table[k].microbatch, table[k].chunk);
    for (int k = 0; k < total; ++k) {
      const bool steady = k + warmup < total;
      if (steady) order.forward(table[k + warmup].microbatch, table[k + warmup].chunk);
      order.input(table[k].microbatch, v - 1 - table[k].chunk);
      if (!steady || k >= r) order.weight();
    }
    order.all_weights();
  }
}

}  // namespace lockstep::schedule::detail
