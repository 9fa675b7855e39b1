// SPDX-License-Identifier: Apache-2.0
#include "lockstep/parallel/pipeline/progress.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::parallel::detail {
namespace {

using schedule::Action;
using schedule::Op;

constexpr int kIndexBits = 20, kPeerBits = 14;

std::string key_of(const comm::Group& group, int rank) {
  return format("pipeline/{}/{}", group.name(), rank);
}

std::string_view words_for(Op op) {
  switch (op) {
    case Op::forward:
      return "the forward";
    case Op::backward:
      return "the backward";
    case Op::backward_input:
      return "the backward to inputs";
    case Op::backward_weight:
      return "the backward to weights";
    case Op::send_activation:
    case Op::send_gradient:
      return "a send";
    case Op::recv_activation:
    case Op::recv_gradient:
      return "a receive";
    case Op::unshard:
      return "the gathering of parameters";
    case Op::reshard:
      return "the release of parameters";
    case Op::reduce:
      return "the reduction of gradients";
  }
  return "";
}

}  // namespace

uint64_t Standing::pack() const {
  return run << (kIndexBits + kPeerBits) | static_cast<uint64_t>(index) << kPeerBits |
         static_cast<uint64_t>(waits_for - kAll);
}

Standing Standing::unpack(uint64_t word) {
  return {.run = word >> (kIndexBits + kPeerBits),
          .index = static_cast<size_t>(word >> kPeerBits & ((1U << kIndexBits) - 1)),
          .waits_for = static_cast<int>(word & ((1U << kPeerBits) - 1)) + kAll};
}

Progress::Progress(const comm::Group& group, std::function<void(const std::string&)> stuck)
    : group_(group), stuck_(std::move(stuck)) {
  if (group_.size() == 1) return;
  word_ = comm::publish_word(group_, key_of(group_, group_.rank()));
  tell();
  thread_ = std::jthread([this](const std::stop_token& stop) { watch(stop); });
}

Progress::~Progress() = default;

void Progress::tell() {
  if (word_) word_->store(mine_.pack(), std::memory_order_relaxed);
}

void Progress::begin(const schedule::Program& program) {
  {
    const std::lock_guard lock(mutex_);
    program_ = &program;
  }
  mine_ = {.run = mine_.run + 1};
  tell();
}

void Progress::reach(size_t index) {
  mine_.index = index;
  tell();
}

void Progress::end() {
  const std::lock_guard lock(mutex_);
  program_ = nullptr;
}

void Progress::set_waiting(int peer) {
  mine_.waits_for = peer;
  waits_since_.store(Clock::now(), std::memory_order_relaxed);
  tell();
}

std::exception_ptr Progress::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

// Does nothing until this rank has waited for a while: then one look at the store for each rank of
// the chain.
void Progress::watch(const std::stop_token& stop) {
  const milliseconds timeout = group_.timeout();
  const milliseconds interval = std::clamp(timeout / 10, milliseconds{20}, milliseconds{1000});
  std::unique_lock lock(mutex_);
  while (!wake_.wait_for(lock, stop, interval, [&] { return stop.stop_requested(); })) {
    const Standing mine = Standing::unpack(word_->load(std::memory_order_relaxed));
    const Clock::time_point since = waits_since_.load(std::memory_order_relaxed);
    if (program_ == nullptr || mine.waits_for == Standing::kNone || Clock::now() - since < interval)
      continue;
    try {
      const std::vector<int> ranks = chain(mine);
      // Of a rank that has not begun this run nothing is known but that it is awaited since now.
      const Clock::time_point still =
          ranks.empty() ? since : std::max(since, seen_[ranks.back()].since);
      if (Clock::now() - still < timeout) continue;
      const std::string why =
          ranks.empty()
              ? format(
                    "[pipeline] all {} ranks of the pipeline are in the exchange "
                    "around a step, and none has left it for {:.1f} s, the timeout",
                    group_.size(), seconds_since(still))
              : format("{} has made no progress for {:.1f} s, the timeout; {}", describe(ranks),
                       seconds_since(still), describe(ranks.back(), look(ranks.back())));
      failure_ = std::make_exception_ptr(TimeoutError(why));
      lock.unlock();
      return stuck_(why);
    } catch (const std::exception&) {
      return;  // without the store, what is left are the deadlines of operations
    }
  }
}

Standing Progress::look(int rank) {
  if (rank == group_.rank()) return Standing::unpack(word_->load(std::memory_order_relaxed));
  const uint64_t word = comm::find_word(group_, key_of(group_, rank)).value_or(Standing{}.pack());
  const auto [found, is_new] = seen_.emplace(rank, Seen{word, Clock::now()});
  if (!is_new && found->second.word != word) found->second = {word, Clock::now()};
  return Standing::unpack(word);
}

// Of the ranks that have not come to where this one waits for all, the last.
int Progress::behind(const Standing& waiting) {
  int last = Standing::kNone;
  Standing its;
  for (int rank = 0; rank < group_.size(); ++rank) {
    if (rank == group_.rank()) continue;
    const Standing standing = look(rank);
    const auto place = std::pair(standing.run, standing.index);
    const bool is_there =
        place >= std::pair(waiting.run, waiting.index) &&
        (place > std::pair(waiting.run, waiting.index) || standing.waits_for == Standing::kAll);
    if (is_there || (last != Standing::kNone && place >= std::pair(its.run, its.index))) continue;
    last = rank;
    its = standing;
  }
  return last;
}

// A rank that says that it waits may have been stopped before it could say that it does not.
bool Progress::was_sent(int rank, const Standing& standing) {
  const Standing sender = look(standing.waits_for);
  if (sender.run != standing.run) return sender.run > standing.run;
  const Standing mine = look(group_.rank());
  const auto& actions = program_->actions[static_cast<size_t>(rank)];
  if (standing.run != mine.run || standing.index >= actions.size()) return false;
  const Action& action = actions[standing.index];
  const bool forward = action.op == Op::forward;
  const int stage = program_->stage(rank, action.chunk) + (forward ? -1 : 1);
  const auto& sends = program_->actions[static_cast<size_t>(standing.waits_for)];
  const auto sent = std::find_if(sends.begin(), sends.end(), [&](const Action& send) {
    return send.op == (forward ? Op::send_activation : Op::send_gradient) &&
           send.microbatch == action.microbatch &&
           program_->stage(standing.waits_for, send.chunk) == stage;
  });
  return static_cast<size_t>(sent - sends.begin()) < sender.index;
}

std::vector<int> Progress::chain(const Standing& mine) {
  std::vector<int> ranks;
  int next = mine.waits_for;
  Standing standing = mine;
  for (;;) {
    if (next == Standing::kAll) next = behind(standing);
    if (next == Standing::kNone) return ranks;
    const bool seen_before =
        next == group_.rank() || std::find(ranks.begin(), ranks.end(), next) != ranks.end();
    if (seen_before) return ranks;
    ranks.push_back(next);
    standing = look(next);
    if (standing.waits_for >= 0 && was_sent(next, standing)) return ranks;
    next = standing.waits_for;
  }
}

std::string Progress::describe(const std::vector<int>& chain) {
  std::string text = format("[pipeline] rank {} waits for rank {}", group_.rank(), chain.front());
  for (size_t i = 1; i < chain.size(); ++i) text += format(", which waits for rank {}", chain[i]);
  const int last = chain.back();
  return format("{}; rank {} of the pipeline, rank {} of the job,", text, last,
                group_.members()[static_cast<size_t>(last)]);
}

std::string Progress::describe(int rank, const Standing& standing) const {
  const Standing mine = Standing::unpack(word_->load(std::memory_order_relaxed));
  if (standing.run < mine.run) return "it has not begun this step";
  const auto& actions = program_->actions[static_cast<size_t>(rank)];
  if (standing.run > mine.run || standing.index >= actions.size())
    return "it has done all its actions, and is in the exchange at the end of the step";
  const Action& action = actions[standing.index];
  std::string text = format("it is in {}", words_for(action.op));
  if (action.microbatch >= 0) text += format(" of micro-batch {}", action.microbatch);
  return format("{} of stage {} (action {} of {})", text, program_->stage(rank, action.chunk),
                standing.index + 1, actions.size());
}

}  // namespace lockstep::parallel::detail
