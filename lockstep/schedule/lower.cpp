// SPDX-License-Identifier: Apache-2.0
#include "lockstep/schedule/lower.h"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <map>
#include <optional>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/schedule/links.h"

namespace lockstep::schedule {
namespace {

using detail::Links;
using detail::Position;

// What stands before and behind each computation of one rank.
struct Around {
  std::vector<std::vector<Action>> before, behind;
};

bool is_forward(const Action& action) { return action.op == Op::forward; }

// The send and the receive of the value that `from` makes and `to` uses.
Action send_of(const Action& from) {
  return {is_forward(from) ? Op::send_activation : Op::send_gradient, from.microbatch, from.chunk};
}
Action recv_of(const Action& to) {
  return {is_forward(to) ? Op::recv_activation : Op::recv_gradient, to.microbatch, to.chunk};
}

// A value that goes from one rank to another.
struct Message {
  size_t made, used;  // indices of computations, on the sender and on the receiver
};

// By sender and receiver, in the order of sending.
std::map<std::pair<int, int>, std::vector<Message>> messages(const Schedule& schedule) {
  const Links links(schedule);
  std::map<std::pair<int, int>, std::vector<Message>> channels;
  for (int rank = 0; rank < schedule.ranks; ++rank) {
    for (size_t i = 0; i < schedule.actions[rank].size(); ++i) {
      const auto input = links.input({rank, i});
      if (input && input->rank != rank) {
        channels[{input->rank, rank}].push_back({input->index, i});
      }
    }
  }
  for (auto& [ends, channel] : channels) {
    std::sort(channel.begin(), channel.end(),
              [](const Message& a, const Message& b) { return a.made < b.made; });
  }
  return channels;
}

void add_messages(const Schedule& schedule, std::vector<Around>& around) {
  for (const auto& [ends, channel] : messages(schedule)) {
    const auto& [sender, receiver] = ends;
    // A receive may be asked for only behind those of what is sent before it. So where a value is
    // used earlier than one that was sent before it, that one is asked for earlier too.
    std::vector<size_t> asked(channel.size());
    size_t latest = std::numeric_limits<size_t>::max();
    for (size_t k = channel.size(); k-- > 0;) {
      latest = std::min(latest, channel[k].used == 0 ? 0 : channel[k].used - 1);
      asked[k] = latest;
    }
    for (size_t k = 0; k < channel.size(); ++k) {
      const Action& from = schedule.actions[sender][channel[k].made];
      const Action& to = schedule.actions[receiver][channel[k].used];
      around[sender].behind[channel[k].made].push_back(send_of(from));
      around[receiver].before[asked[k]].push_back(recv_of(to));
    }
  }
}

// Gathers and frees the chunks of one rank.
class Gather {
 public:
  Gather(const std::vector<Action>& actions, int chunks, int most, Around& around)
      : actions_(actions), most_(static_cast<size_t>(most)), around_(around), uses_(chunks) {
    for (size_t i = 0; i < actions.size(); ++i) uses_[actions[i].chunk].push_back(i);
  }

  void place() {
    for (size_t i = 0; i < actions_.size(); ++i) {
      const int chunk = actions_[i].chunk;
      open(chunk, i, i);
      if (i + 1 < actions_.size()) open(actions_[i + 1].chunk, i, i + 1);
      if (uses_[chunk].back() == i) {
        std::erase(open_, chunk);
        around_.behind[i].push_back({Op::reshard, -1, chunk});
      }
    }
  }

 private:
  // Gathers a chunk before computation `at`, for its use by computation `use`; not if there is no
  // room ahead of that use, because the only open chunk is at work until then.
  void open(int chunk, size_t at, size_t use) {
    if (std::find(open_.begin(), open_.end(), chunk) != open_.end()) return;
    if (open_.size() == most_) {
      const auto idle = needed_last(at);
      if (!idle) {
        check(use > at, "a chunk has no room to be used");
        return;
      }
      std::erase(open_, *idle);
      around_.before[at].push_back({Op::reshard, -1, *idle});
    }
    open_.push_back(chunk);
    around_.before[at].push_back({Op::unshard, -1, chunk});
  }

  // Among the open chunks that computation `at` does not use.
  std::optional<int> needed_last(size_t at) const {
    std::optional<int> last;
    size_t furthest = 0;
    for (const int chunk : open_) {
      if (chunk == actions_[at].chunk) continue;
      const auto& uses = uses_[chunk];
      const size_t next = *std::upper_bound(uses.begin(), uses.end(), at);
      if (!last || next > furthest) {
        last = chunk;
        furthest = next;
      }
    }
    return last;
  }

  const std::vector<Action>& actions_;
  size_t most_;
  Around& around_;
  std::vector<std::vector<size_t>> uses_;  // by chunk: its computations
  std::vector<int> open_;
};

void add_reduces(const std::vector<Action>& actions, int chunks, Around& around) {
  for (int chunk = 0; chunk < chunks; ++chunk) {
    const auto last = std::find_if(actions.rbegin(), actions.rend(), [&](const Action& action) {
      return action.chunk == chunk &&
             (action.op == Op::backward || action.op == Op::backward_weight);
    });
    around.behind[actions.rend() - last - 1].push_back({Op::reduce, -1, chunk});
  }
}

}  // namespace

Program lower(const Schedule& schedule, const LowerOptions& options) {
  if (options.max_unsharded < 1) {
    throw ConfigError(
        format("[schedule] max_unsharded is {}, must be at least 1", options.max_unsharded));
  }
  std::vector<Around> around(schedule.ranks);
  for (int rank = 0; rank < schedule.ranks; ++rank) {
    around[rank].before.resize(schedule.actions[rank].size());
    around[rank].behind.resize(schedule.actions[rank].size());
  }
  add_messages(schedule, around);
  Program program{static_cast<const Pipeline&>(schedule)};
  for (int rank = 0; rank < schedule.ranks; ++rank) {
    const auto& computation = schedule.actions[rank];
    if (options.reduce) add_reduces(computation, schedule.chunks, around[rank]);
    if (options.unshard) {
      Gather(computation, schedule.chunks, options.max_unsharded, around[rank]).place();
    }
    auto& actions = program.actions.emplace_back();
    const auto append = [&](const std::vector<Action>& more) {
      actions.insert(actions.end(), more.begin(), more.end());
    };
    for (size_t i = 0; i < computation.size(); ++i) {
      append(around[rank].before[i]);
      actions.push_back(computation[i]);
      append(around[rank].behind[i]);
    }
  }
  return program;
}

}  // namespace lockstep::schedule
