// Adds up the gradients of successive micro-batches as a binary tree, whatever their number.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace lockstep::parallel::detail {

// Works like a binary counter: level k holds the sum of 2^k leaves, so n leaves need at most
// log2(n) buffers, and leaves 0..n-1 are combined as ((0 1)(2 3))((4 5)(6 7)), split at the largest
// power of two, as fabric::reduce combines ranks.
class SumTree {
 public:
  // Takes a copy of the next leaf.
  void push(const at::Tensor& leaf);
  // Replaces the last leaf by the sum of all, and forgets them.
  void finish(const at::Tensor& leaf);

 private:
  std::vector<at::Tensor> levels_;  // undefined where a level is empty
  std::vector<at::Tensor> spare_;
};

}  // namespace lockstep::parallel::detail
