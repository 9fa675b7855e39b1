// SPDX-License-Identifier: Apache-2.0
#include "lockstep/schedule/validate.h"

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/schedule/links.h"

namespace lockstep::schedule {
namespace detail {
namespace {

std::optional<std::string> shape_fault(const Schedule& schedule) {
  for (const auto& [name, value] :
       {std::pair{"ranks", schedule.ranks}, std::pair{"microbatches", schedule.microbatches},
        std::pair{"chunks", schedule.chunks}}) {
    if (value < 1) return format("{} is {}, must be at least 1", name, value);
  }
  if (places(schedule) > kMostPlaces) {
    return format("{} ranks x {} micro-batches x {} chunks must be at most {}", schedule.ranks,
                  schedule.microbatches, schedule.chunks, kMostPlaces);
  }
  if (schedule.order == StageOrder::v && schedule.chunks != 2) {
    return format("chunks is {}, must be 2: the stages lie in a V", schedule.chunks);
  }
  if (schedule.actions.size() != static_cast<size_t>(schedule.ranks)) {
    return format("there are actions of {} ranks, must be of {}", schedule.actions.size(),
                  schedule.ranks);
  }
  return std::nullopt;
}

// Which actions of one micro-batch on one chunk a rank has had so far.
struct Seen {
  bool forward = false, whole = false, input = false, weight = false;
};

class RankCheck {
 public:
  RankCheck(const Schedule& schedule, int rank)
      : schedule_(schedule),
        actions_(schedule.actions[rank]),
        seen_(static_cast<size_t>(schedule.chunks) * schedule.microbatches) {}

  std::optional<std::string> fault() {
    for (const Action& action : actions_) {
      if (auto what = next(action)) return name(action) + " " + *what;
    }
    for (int chunk = 0; chunk < schedule_.chunks; ++chunk) {
      for (int microbatch = 0; microbatch < schedule_.microbatches; ++microbatch) {
        const Seen& seen = at({Op::forward, microbatch, chunk});
        const auto missing = [&](Op op) { return name({op, microbatch, chunk}) + " is missing"; };
        if (!seen.forward) return missing(Op::forward);
        if (seen.input && !seen.weight) return missing(Op::backward_weight);
        if (!seen.whole && !seen.input) return missing(Op::backward);
      }
    }
    return std::nullopt;
  }

 private:
  std::string name(const Action& action) const { return name_of(action, schedule_.chunks); }
  Seen& at(const Action& action) {
    return seen_[static_cast<size_t>(action.chunk) * schedule_.microbatches + action.microbatch];
  }

  std::optional<std::string> next(const Action& action) {
    if (!is_computation(action.op)) return "is not a computation";
    if (action.microbatch < 0 || action.microbatch >= schedule_.microbatches) {
      return format("is of a micro-batch that is not in 0 to {}", schedule_.microbatches - 1);
    }
    if (action.chunk < 0 || action.chunk >= schedule_.chunks) {
      return format("is of a chunk that is not in 0 to {}", schedule_.chunks - 1);
    }
    Seen& seen = at(action);
    const auto behind = [&](Op op, const char* word) {
      return format("{} {}", word, name({op, action.microbatch, action.chunk}));
    };
    bool* mark = &seen.forward;
    if (action.op == Op::backward) mark = &seen.whole;
    if (action.op == Op::backward_input) mark = &seen.input;
    if (action.op == Op::backward_weight) mark = &seen.weight;
    if (*mark) return "is there twice";
    *mark = true;
    if (action.op == Op::forward) return std::nullopt;
    if (!seen.forward) return behind(Op::forward, "must stand behind");
    if (seen.whole && (seen.input || seen.weight)) {
      return action.op == Op::backward ? behind(Op::backward_input, "repeats")
                                       : behind(Op::backward, "repeats a part of");
    }
    if (seen.weight && !seen.input) return behind(Op::backward_input, "must stand behind");
    return std::nullopt;
  }

  const Schedule& schedule_;
  const std::vector<Action>& actions_;
  std::vector<Seen> seen_;
};

// The ranks stand still with `done` actions behind them: says what the first of them waits for.
Fault still(const Schedule& schedule, const Links& links, const std::vector<size_t>& done) {
  int rank = 0;
  while (done[rank] == schedule.actions[rank].size()) ++rank;
  const auto input = *links.input({rank, done[rank]});
  const auto name = [&](Position at) {
    return name_of(schedule.actions[at.rank][at.index], schedule.chunks);
  };
  return {rank, format("{} waits for {} of rank {}, which in this order never runs",
                       name({rank, done[rank]}), name(input), input.rank)};
}

}  // namespace

int64_t places(const Pipeline& pipeline) {
  int64_t count = 1;
  for (const int64_t factor : {pipeline.ranks, pipeline.microbatches, pipeline.chunks}) {
    count = std::min(count * factor, int64_t{1} << 31);  // no overflow on the way
  }
  return count;
}

std::optional<Fault> find_fault(const Schedule& schedule) {
  if (auto what = shape_fault(schedule)) return Fault{-1, *what};
  for (int rank = 0; rank < schedule.ranks; ++rank) {
    if (auto what = RankCheck(schedule, rank).fault()) return Fault{rank, *what};
  }
  const Links links(schedule);
  const auto done = run(schedule, links, [](Position, std::optional<Position>) {});
  for (int rank = 0; rank < schedule.ranks; ++rank) {
    if (done[rank] < schedule.actions[rank].size()) return still(schedule, links, done);
  }
  return std::nullopt;
}

}  // namespace detail

void validate(const Schedule& schedule) {
  const auto fault = detail::find_fault(schedule);
  if (!fault) return;
  const auto kind = layout::name_of(schedule.kind);
  if (fault->rank < 0) throw ConfigError(format("[schedule] {}: {}", kind, fault->what));
  throw ConfigError(format("[schedule] {}: rank {}: {}", kind, fault->rank, fault->what));
}

}  // namespace lockstep::schedule
