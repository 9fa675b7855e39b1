// SPDX-License-Identifier: Apache-2.0
// Adds up the gradients of the micro-batches of a step as a binary tree, whatever their number and
// the order in which they come.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <utility>
#include <vector>

namespace lockstep::parallel::detail {

// Leaves 0..n-1 are combined as ((0 1)(2 3))((4 5)(6 7)), split at the largest power of two, as
// fabric::reduce combines ranks. In order or in reverse, n leaves need at most log2(n) + 1 buffers.
class SumTree {
 public:
  using Place = std::pair<int, int64_t>;  // level, and place in it: leaves [place << level, ...)

  // Takes a copy of a leaf: that of this index, or the next one.
  void push(const at::Tensor& leaf, std::optional<int64_t> index = {});
  // Replaces the last leaf in order by the sum of all, and forgets them.
  void finish(const at::Tensor& leaf);
  // Writes the sum of what was pushed, and forgets it. Nothing was: zeros.
  void write_sum(const at::Tensor& out);
  // The same tree with its sums laid out in another way: `sum_at` makes that of each place.
  SumTree laid_out(const std::function<at::Tensor(const Place&)>& sum_at) const;
  const at::Tensor& sum(const Place& place) const { return sums_.at(place); }
  // Whether nothing waits to be summed.
  bool is_empty() const { return sums_.empty(); }

 private:
  std::map<Place, at::Tensor> sums_;  // of whole subtrees whose sibling is not there yet
  std::vector<at::Tensor> spare_;
  int64_t next_ = 0;
};

}  // namespace lockstep::parallel::detail
