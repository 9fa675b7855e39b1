// SPDX-License-Identifier: Apache-2.0
#include <cstddef>
#include <deque>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/schedule/lower.h"

namespace lockstep::schedule {
namespace {

// A value: the activation that a stage's forward makes, or the gradient of its input that its
// backward makes.
struct Value {
  bool gradient;
  int stage, microbatch;

  bool operator==(const Value&) const = default;
  bool operator<(const Value& other) const {
    return std::tie(gradient, stage, microbatch) <
           std::tie(other.gradient, other.stage, other.microbatch);
  }
};

// Two queues between a pair of ranks: what was sent, and what was asked for. Fronts meet.
struct Channel {
  std::deque<std::pair<Value, Action>> sent, asked;
};

class ProgramExecution {
 public:
  explicit ProgramExecution(const Program& program)
      : program_(program), next_(program.ranks), has_(program.ranks), asked_(program.ranks) {}

  void to_end() {
    for (bool moved = true; moved;) {
      moved = false;
      for (int rank = 0; rank < program_.ranks; ++rank) {
        while (next_[rank] < program_.actions[rank].size() && step(rank)) {
          ++next_[rank];
          moved = true;
        }
      }
    }
    report();
  }

 private:
  using Pair = std::pair<int, int>;  // sender, receiver

  std::string name(const Action& action) const { return name_of(action, program_.chunks); }
  [[noreturn]] void refuse(int rank, const Action& action, const std::string& what) const {
    throw ConfigError(format("[schedule] rank {}: {} {}", rank, name(action), what));
  }

  // False: it has to wait.
  bool step(int rank) {
    const Action& action = program_.actions[rank][next_[rank]];
    const int stage = program_.stage(rank, action.chunk);
    switch (action.op) {
      case Op::forward:
      case Op::backward:
      case Op::backward_input:
        return compute(rank, action, stage);
      case Op::send_activation:
      case Op::send_gradient: {
        const Value value{action.op == Op::send_gradient, stage, action.microbatch};
        if (!has_[rank].contains(value)) refuse(rank, action, "sends what is not computed yet");
        channels_[{rank, program_.peer(rank, action)}].sent.emplace_back(value, action);
        meet(rank, program_.peer(rank, action));
        return true;
      }
      case Op::recv_activation:
      case Op::recv_gradient: {
        const bool gradient = action.op == Op::recv_gradient;
        const Value value{gradient, stage + (gradient ? 1 : -1), action.microbatch};
        asked_[rank].insert(value);
        channels_[{program_.peer(rank, action), rank}].asked.emplace_back(value, action);
        meet(program_.peer(rank, action), rank);
        return true;
      }
      default:
        return true;
    }
  }

  bool compute(int rank, const Action& action, int stage) {
    const bool gradient = action.op != Op::forward;
    const int other = stage + (gradient ? 1 : -1);
    if (other >= 0 && other < program_.stages()) {
      const Value value{gradient, other, action.microbatch};
      if (!has_[rank].contains(value)) {
        const bool local = program_.place(other).rank == rank;
        if (!local && !asked_[rank].contains(value)) {
          refuse(rank, action, "uses a value that no receive before it asks for");
        }
        return false;
      }
    }
    has_[rank].insert({gradient, stage, action.microbatch});
    return true;
  }

  void meet(int sender, int receiver) {
    auto& [sent, asked] = channels_[{sender, receiver}];
    while (!sent.empty() && !asked.empty()) {
      if (sent.front().first != asked.front().first) {
        refuse(receiver, asked.front().second,
               format("is paired with {} of rank {}: receives are in another order than sends",
                      name(sent.front().second), sender));
      }
      has_[receiver].insert(sent.front().first);
      sent.pop_front();
      asked.pop_front();
    }
  }

  void report() const {
    std::vector<std::string> waits;
    for (int rank = 0; rank < program_.ranks; ++rank) {
      if (next_[rank] == program_.actions[rank].size()) continue;
      const Action& action = program_.actions[rank][next_[rank]];
      const int other = program_.stage(rank, action.chunk) + (action.op == Op::forward ? -1 : 1);
      waits.push_back(
          format("rank {} at {} for rank {}", rank, name(action), program_.place(other).rank));
    }
    if (!waits.empty()) {
      throw ConfigError(format("[schedule] the ranks wait for each other: {}", join(waits)));
    }
    for (const auto& [ends, channel] : channels_) {
      if (!channel.sent.empty()) {
        refuse(ends.first, channel.sent.front().second,
               format("is never received by rank {}", ends.second));
      }
      if (!channel.asked.empty()) {
        refuse(ends.second, channel.asked.front().second,
               format("is never sent by rank {}", ends.first));
      }
    }
  }

  const Program& program_;
  std::vector<size_t> next_;          // by rank: the action it stands before
  std::vector<std::set<Value>> has_;  // by rank: computed or received
  std::vector<std::set<Value>> asked_;
  std::map<Pair, Channel> channels_;
};

}  // namespace

void check_deadlock(const Program& program) { ProgramExecution(program).to_end(); }

}  // namespace lockstep::schedule
