// SPDX-License-Identifier: Apache-2.0
// n ranks, a vector of n blocks. reduce_scatter: partial sums of a block travel around the ring,
// each rank adding its own, and end at the block's owner after n - 1 steps. all_gather: finished
// blocks travel on. all_reduce is the two after each other: 2 (n - 1) / n of the vector is sent by
// each rank, the least there is. Blocks are cut into pieces; a piece moves on as soon as it is
// there, so that a rank sends, receives and adds at the same time.
#include "lockstep/comm/strategy/ring.h"

#include <algorithm>
#include <deque>
#include <functional>
#include <numeric>

#include "lockstep/layout/shard_math.h"

namespace lockstep::comm::strategy {
namespace {

constexpr size_t kAhead = 2;  // pieces that are asked for before they are needed

using Bytes = std::span<std::byte>;
using ConstBytes = std::span<const std::byte>;

// Where the blocks of a vector lie, in bytes.
class Blocks {
 public:
  Blocks(const std::vector<int64_t>& counts, size_t width) : starts_{0} {
    for (const int64_t count : counts)
      starts_.push_back(starts_.back() + static_cast<size_t>(count) * width);
  }
  template <class Span>
  Span of(Span whole, int block) const {
    return whole.subspan(starts_[static_cast<size_t>(block)], size(block));
  }
  size_t size(int block) const {
    return starts_[static_cast<size_t>(block) + 1] - starts_[static_cast<size_t>(block)];
  }
  size_t largest() const {
    size_t most = 0;
    for (int block = 0; block + 1 < static_cast<int>(starts_.size()); ++block)
      most = std::max(most, size(block));
    return most;
  }

 private:
  std::vector<size_t> starts_;
};

std::vector<int64_t> balanced(int64_t total, int parts) {
  std::vector<int64_t> counts;
  for (int part = 0; part < parts; ++part)
    counts.push_back(layout::balanced_range(total, parts, part).size());
  return counts;
}

class Ring final : public Algorithm {
 public:
  explicit Ring(AlgorithmGroup messages)
      : messages_(std::move(messages)), size_(messages_.size()), me_(messages_.rank()) {}

  layout::CommStrategy strategy() const override { return layout::CommStrategy::ring; }
  bool covers(OpKind kind) const override {
    return kind == OpKind::all_reduce || kind == OpKind::reduce_scatter ||
           kind == OpKind::all_gather || kind == OpKind::broadcast;
  }
  std::vector<GroupImpl*> groups() const override { return {messages_.group()}; }

  void run(CollectiveJob& job) override {
    const Operation& operation = job.operation;
    switch (operation.kind) {
      case OpKind::all_reduce: {
        const Blocks blocks(balanced(operation.count, size_), job.width());
        // A block's partial sum is taken where the block is.
        reduce(job, blocks, operation.output,
               [&](int, int block) { return blocks.of(operation.output, block); });
        return gather(job, blocks, operation.output);
      }
      case OpKind::reduce_scatter:
        return reduce_scatter(job);
      case OpKind::all_gather: {
        const Blocks blocks(operation.recv_counts, job.width());
        const Bytes mine = blocks.of(operation.output, me_);
        if (mine.data() != operation.input.data())
          std::copy(operation.input.begin(), operation.input.end(), mine.begin());
        return gather(job, blocks, operation.output);
      }
      default:
        return broadcast(job);
    }
  }

 private:
  using Sends = std::vector<std::shared_ptr<Pending>>;

  int around(int rank) const { return ((rank % size_) + size_) % size_; }
  int next() const { return around(me_ + 1); }
  int previous() const { return around(me_ - 1); }
  static void wait(Sends& sends) {
    for (const auto& send : sends) send->wait();
    sends.clear();
  }

  // Ends with this rank's block complete. In step s the partial sum of block me - 2 - s comes in;
  // target(s, block) is where its sum with this rank's part of `input` goes, and is sent from in
  // the next step. A target may be used again two steps later.
  void reduce(CollectiveJob& job, const Blocks& blocks, ConstBytes input,
              const std::function<Bytes(int step, int block)>& target) const {
    struct Incoming {
      int step, block;
      size_t piece;
    };
    const Pieces pieces(blocks.largest(), job.width());
    std::vector<Incoming> incoming;
    for (int step = 0; step < size_ - 1; ++step) {
      const int block = around(me_ - 2 - step);
      for (size_t piece = 0; piece < pieces.count(blocks.size(block)); ++piece)
        incoming.push_back({step, block, piece});
    }
    const Bytes space = add_scratch(job, kAhead * std::min(pieces.bytes(), blocks.largest()));
    const auto landing = [&](size_t i) {
      const size_t bytes = pieces.of(blocks.of(input, incoming[i].block), incoming[i].piece).size();
      return space.subspan(i % kAhead * (space.size() / kAhead), bytes);
    };
    std::deque<std::shared_ptr<Pending>> receives;
    const auto ask = [&](size_t i) {
      if (i < incoming.size()) receives.push_back(messages_.recv(job, landing(i), previous()));
    };
    for (size_t i = 0; i < kAhead; ++i) ask(i);

    std::vector<Sends> sends(static_cast<size_t>(size_));  // by the step that they are part of
    const ConstBytes first = blocks.of(input, previous());
    for (size_t piece = 0; piece < pieces.count(first.size()); ++piece)
      sends[0].push_back(messages_.send(job, pieces.of(first, piece), next()));
    for (size_t i = 0; i < incoming.size(); ++i) {
      const auto [step, block, piece] = incoming[i];
      if (step >= 2) wait(sends[static_cast<size_t>(step) - 1]);
      receives.front()->wait();
      receives.pop_front();
      const Bytes sum = pieces.of(target(step, block), piece);
      accumulate(job, sum, landing(i), pieces.of(blocks.of(input, block), piece));
      ask(i + kAhead);
      if (step + 1 < size_ - 1)
        sends[static_cast<size_t>(step) + 1].push_back(messages_.send(job, sum, next()));
    }
    for (Sends& rest : sends) wait(rest);
  }

  void reduce_scatter(CollectiveJob& job) const {
    const Operation& operation = job.operation;
    const Blocks blocks(operation.send_counts, job.width());
    const Bytes space = add_scratch(job, 2 * blocks.largest());
    reduce(job, blocks, operation.input, [&](int step, int block) {
      return step == size_ - 2 ? operation.output
                               : space.subspan(static_cast<size_t>(step % 2) * blocks.largest(),
                                               blocks.size(block));
    });
  }

  // Begins with this rank's block complete, ends with all of them.
  void gather(CollectiveJob& job, const Blocks& blocks, Bytes whole) const {
    const Pieces pieces(blocks.largest(), job.width());
    std::vector<std::pair<int, Bytes>> incoming;  // step, where it goes
    for (int step = 0; step < size_ - 1; ++step) {
      const Bytes block = blocks.of(whole, around(me_ - 1 - step));
      for (size_t piece = 0; piece < pieces.count(block.size()); ++piece)
        incoming.push_back({step, pieces.of(block, piece)});
    }
    Sends sends;
    const Bytes mine = blocks.of(whole, me_);
    for (size_t piece = 0; piece < pieces.count(mine.size()); ++piece)
      sends.push_back(messages_.send(job, pieces.of(mine, piece), next()));
    pass_on(job, incoming, size_ - 2, sends);
    wait(sends);
  }

  // Receives pieces in order and sends on those of steps before `last`.
  void pass_on(const CollectiveJob& job, const std::vector<std::pair<int, Bytes>>& incoming,
               int last, Sends& sends) const {
    std::deque<std::shared_ptr<Pending>> receives;
    const auto ask = [&](size_t i) {
      if (i < incoming.size())
        receives.push_back(messages_.recv(job, incoming[i].second, previous()));
    };
    for (size_t i = 0; i < kAhead; ++i) ask(i);
    for (size_t i = 0; i < incoming.size(); ++i) {
      receives.front()->wait();
      receives.pop_front();
      ask(i + kAhead);
      if (incoming[i].first < last)
        sends.push_back(messages_.send(job, incoming[i].second, next()));
    }
  }

  // A chain that begins at the root.
  void broadcast(CollectiveJob& job) const {
    const Bytes whole = job.operation.output;
    const Pieces pieces(whole.size(), job.width());
    const int place = around(me_ - job.operation.root);
    Sends sends;
    std::vector<std::pair<int, Bytes>> all;
    for (size_t piece = 0; piece < pieces.count(whole.size()); ++piece)
      all.push_back({place, pieces.of(whole, piece)});
    if (place == 0) {
      for (const auto& [step, bytes] : all) sends.push_back(messages_.send(job, bytes, next()));
    } else {
      pass_on(job, all, size_ - 1, sends);
    }
    wait(sends);
  }

  AlgorithmGroup messages_;
  int size_, me_;
};

}  // namespace

std::unique_ptr<Algorithm> make_ring(AlgorithmGroup messages) {
  return std::make_unique<Ring>(std::move(messages));
}

}  // namespace lockstep::comm::strategy
