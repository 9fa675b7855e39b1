// SPDX-License-Identifier: Apache-2.0
// Schedules of two chunks per rank whose stages go down the ranks and back up: a V. p ranks, m
// micro-batches, rank r.
#include <algorithm>
#include <array>

#include "lockstep/schedule/generate/generators.h"
#include "lockstep/schedule/generate/order.h"

namespace lockstep::schedule::detail {
namespace {

// Every op takes the micro-batches of a chunk in turn, so that a schedule is a sequence of ops.
class Turns {
 public:
  Turns(Schedule& schedule, int rank)
      : order_(schedule, rank), microbatches_(schedule.microbatches) {}

  void forward(int chunk) { take(Op::forward, chunk, forwards_[chunk]); }
  void backward(int chunk) { take(Op::backward, chunk, backwards_[chunk]); }
  void input(int chunk) { take(Op::backward_input, chunk, backwards_[chunk]); }
  void weight(int chunk) { take(Op::backward_weight, chunk, weights_[chunk]); }
  int forwards(int chunk) const { return forwards_[chunk]; }
  int pending(int chunk) const { return backwards_[chunk] - weights_[chunk]; }

 private:
  // Those that there are not are counted and left out.
  void take(Op op, int chunk, int& next) {
    if (next < microbatches_) order_.add(op, next, chunk);
    ++next;
  }

  Order order_;
  int microbatches_;
  std::array<int, 2> forwards_{}, backwards_{}, weights_{};
};

}  // namespace

// With fewer than 2p-1 micro-batches it is the schedule of 2p-1 without those that are missing.
void zb_v(Schedule& schedule) {
  const int p = schedule.ranks, count = std::max(2 * p - 1, schedule.microbatches);
  for (int r = 0; r < p; ++r) {
    Turns turns(schedule, r);
    for (int i = 0; i < 2 * (p - r) - 1; ++i) turns.forward(0);
    for (int i = 0; i < r; ++i) {
      turns.forward(1);
      turns.forward(0);
    }
    for (int i = 0; i < p - r; ++i) {
      turns.forward(1);
      turns.input(1);
      turns.weight(1);
    }
    while (turns.forwards(1) < turns.forwards(0) || turns.forwards(0) < count) {
      if (turns.forwards(0) < count) turns.forward(0);
      turns.input(0);
      turns.weight(0);
      turns.forward(1);
      turns.input(1);
      turns.weight(1);
    }
    for (int i = 0; i < r; ++i) {
      turns.input(0);
      turns.input(1);
    }
    for (int i = 0; i < p - r; ++i) {
      turns.input(0);
      turns.weight(0);
    }
    for (const int chunk : {1, 0}) {
      while (turns.pending(chunk) > 0) turns.weight(chunk);
    }
  }
}

// A forward and a backward that overlap (F and B of neighbouring micro-batches, from "overlapped"
// on) are written one behind the other.
void dualpipe_v(Schedule& schedule) {
  const int p = schedule.ranks, m = schedule.microbatches;
  for (int r = 0; r < p; ++r) {
    Order order(schedule, r);
    std::array<int, 2> forwards{}, backwards{};
    bool split = false;  // backwards leave their weight gradients for later
    const auto forward = [&](int chunk) { order.forward(forwards[chunk]++, chunk); };
    const auto backward = [&](int chunk) {
      const int microbatch = backwards[chunk]++;
      split ? order.input(microbatch, chunk) : order.backward(microbatch, chunk);
    };

    for (int i = 0; i < 2 * (p - r - 1); ++i) forward(0);
    for (int i = 0; i < r + 1; ++i) {
      forward(0);
      forward(1);
    }
    split = true;
    for (int i = 0; i < p - r - 1; ++i) {
      backward(1);
      order.weight();
      forward(1);
    }
    split = false;
    for (int i = 0; i < m - 2 * p + r + 1; ++i) {  // overlapped
      forward(0);
      backward(1);
      forward(1);
      backward(0);
    }
    for (int i = 0; i < p - r - 1; ++i) {
      backward(1);
      forward(1);
      backward(0);
    }
    // The last r+1 backwards of the two chunks; the second half of them is split.
    for (int i = 0; i < 2 * (r + 1); ++i) {
      if (i == r + 1) split = true;
      backward(i % 2 == 0 ? 1 : 0);
    }
    for (int i = 0; i < p - r - 1; ++i) {
      order.weight();
      backward(0);
    }
    order.all_weights();
  }
}

}  // namespace lockstep::schedule::detail
