// SPDX-License-Identifier: Apache-2.0
// The tree is the one that sums are taken in (fabric/reduce.h): at distance d = 1, 2, 4 ... rank r
// takes in what rank r + d has, if r is a multiple of 2 d. So a sum has the same bits as under
// shared memory. 2 log2(n) messages follow each other, which is the least there is; large vectors
// go in pieces, of which several are on their way at once.
#include "lockstep/comm/strategy/tree.h"

#include <algorithm>
#include <bit>
#include <deque>

namespace lockstep::comm::strategy {
namespace {

using Bytes = std::span<std::byte>;

class Tree final : public Algorithm {
 public:
  explicit Tree(AlgorithmGroup messages)
      : messages_(std::move(messages)), size_(messages_.size()), me_(messages_.rank()) {}

  layout::CommStrategy strategy() const override { return layout::CommStrategy::tree; }
  bool covers(OpKind kind) const override {
    return kind == OpKind::all_reduce || kind == OpKind::broadcast;
  }
  std::vector<GroupImpl*> groups() const override { return {messages_.group()}; }

  void run(CollectiveJob& job) override {
    if (job.operation.output.empty()) return;
    TreePass pass(*this, job);
    if (job.operation.kind == OpKind::broadcast) {
      for (size_t i = 0; i < pass.count; ++i) pass.down(i);
    } else {
      // Results of early pieces come down while late ones go up.
      const size_t lag = static_cast<size_t>(std::bit_width(static_cast<unsigned>(size_ - 1)));
      for (size_t i = 0; i < pass.count + lag; ++i) {
        if (i < pass.count) pass.up(i);
        if (i >= lag) pass.down(i - lag);
      }
    }
    for (const auto& send : pass.sends) send->wait();
  }

 private:
  struct TreePass {
    TreePass(const Tree& tree, CollectiveJob& j)
        : job(j), pieces(j.operation.output.size(), j.width()), messages(tree.messages_) {
      // Places are counted from the root, which for a sum is rank 0.
      const int root = j.operation.kind == OpKind::broadcast ? j.operation.root : 0;
      const int place = (tree.me_ - root + tree.size_) % tree.size_;
      const auto rank_at = [&](int p) { return (p + root) % tree.size_; };
      for (int distance = 1; distance < tree.size_; distance *= 2) {
        if (place % (2 * distance) != 0) {
          parent = rank_at(place - distance);
          break;
        }
        if (place + distance < tree.size_) children.push_back(rank_at(place + distance));
      }
      count = pieces.count(j.operation.output.size());
      if (j.operation.kind == OpKind::all_reduce && !children.empty())
        space = add_scratch(j, 2 * children.size() * piece(0).size());
    }
    Bytes piece(size_t i) const { return pieces.of(Bytes(job.operation.output), i); }

    // Asks for piece i of every child; each has room for two.
    void ask_children(size_t i) {
      if (i >= count) return;
      for (size_t child = 0; child < children.size(); ++child)
        from_children.push_back(messages.recv(job, landing(child, i), children[child]));
    }
    Bytes landing(size_t child, size_t i) const {
      return space.subspan((2 * child + i % 2) * piece(0).size(), piece(i).size());
    }
    void up(size_t i) {
      if (i == 0) ask_children(0);
      ask_children(i + 1);
      const Bytes sum = piece(i);
      for (size_t child = 0; child < children.size(); ++child) {
        from_children.front()->wait();
        from_children.pop_front();
        accumulate(job, sum, sum, landing(child, i));
      }
      if (parent >= 0) sends.push_back(messages.send(job, sum, parent));
    }
    // What comes down overwrites what went up: it comes only after this rank's part was read.
    void ask_parent(size_t i) {
      if (parent >= 0 && i < count) from_parent.push_back(messages.recv(job, piece(i), parent));
    }
    void down(size_t i) {
      if (i == 0) ask_parent(0);
      ask_parent(i + 1);
      if (parent >= 0) {
        from_parent.front()->wait();
        from_parent.pop_front();
      }
      // The furthest child has the most below it.
      for (auto child = children.rbegin(); child != children.rend(); ++child)
        sends.push_back(messages.send(job, piece(i), *child));
    }

    CollectiveJob& job;
    Pieces pieces;
    const AlgorithmGroup& messages;
    int parent = -1;
    std::vector<int> children;  // by distance
    size_t count = 0;
    Bytes space;
    std::deque<std::shared_ptr<Pending>> from_children, from_parent;
    std::vector<std::shared_ptr<Pending>> sends;
  };

  AlgorithmGroup messages_;
  int size_, me_;
};

}  // namespace

std::unique_ptr<Algorithm> make_tree(AlgorithmGroup messages) {
  return std::make_unique<Tree>(std::move(messages));
}

}  // namespace lockstep::comm::strategy
