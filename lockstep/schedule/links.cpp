// SPDX-License-Identifier: Apache-2.0
#include "lockstep/schedule/links.h"

namespace lockstep::schedule::detail {

Links::Links(const Schedule& schedule)
    : schedule_(schedule),
      forward_(static_cast<size_t>(schedule.stages()) * schedule.microbatches),
      backward_(forward_.size()) {
  for (int rank = 0; rank < schedule.ranks; ++rank) {
    const auto& actions = schedule.actions[rank];
    for (size_t i = 0; i < actions.size(); ++i) {
      const auto& [op, microbatch, chunk] = actions[i];
      if (op == Op::backward_weight) continue;
      auto& index = op == Op::forward ? forward_ : backward_;
      index[slot(schedule.stage(rank, chunk), microbatch)] = i;
    }
  }
}

size_t Links::slot(int stage, int microbatch) const {
  return static_cast<size_t>(stage) * schedule_.microbatches + microbatch;
}

std::optional<Position> Links::input(Position at) const {
  const auto& [op, microbatch, chunk] = schedule_.actions[at.rank][at.index];
  if (op == Op::backward_weight) return std::nullopt;
  const int other = schedule_.stage(at.rank, chunk) + (op == Op::forward ? -1 : 1);
  if (other < 0 || other == schedule_.stages()) return std::nullopt;
  const auto& index = op == Op::forward ? forward_ : backward_;
  return Position{schedule_.place(other).rank, index[slot(other, microbatch)]};
}

std::vector<size_t> run(
    const Schedule& schedule, const Links& links,
    const std::function<void(Position at, std::optional<Position> input)>& visit) {
  std::vector<size_t> done(schedule.ranks, 0);
  for (bool moved = true; moved;) {
    moved = false;
    for (int rank = 0; rank < schedule.ranks; ++rank) {
      for (size_t& next = done[rank]; next < schedule.actions[rank].size(); ++next) {
        const Position at{rank, next};
        const auto input = links.input(at);
        if (input && input->index >= done[input->rank]) break;
        visit(at, input);
        moved = true;
      }
    }
  }
  return done;
}

}  // namespace lockstep::schedule::detail
