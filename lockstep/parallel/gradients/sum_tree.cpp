// SPDX-License-Identifier: Apache-2.0
#include "lockstep/parallel/gradients/sum_tree.h"

#include <ATen/ATen.h>

namespace lockstep::parallel::detail {

void SumTree::push(const at::Tensor& leaf, std::optional<int64_t> index) {
  Place place{0, index.value_or(next_)};
  next_ = place.second + 1;
  at::Tensor sum = leaf;
  for (;;) {
    const auto sibling = sums_.find({place.first, place.second ^ 1});
    if (sibling == sums_.end()) break;
    at::Tensor other = std::move(sibling->second);
    sums_.erase(sibling);
    other.add_(sum);
    if (!sum.is_same(leaf)) spare_.push_back(sum);
    sum = std::move(other);
    place = {place.first + 1, place.second / 2};
  }
  if (sum.is_same(leaf)) {
    if (spare_.empty()) {
      sum = leaf.clone();
    } else {
      sum = std::move(spare_.back());
      spare_.pop_back();
      sum.copy_(leaf);
    }
  }
  sums_[place] = std::move(sum);
}

// What is left in the tree are the powers of two in the number of leaves; the small ones are added
// first.
void SumTree::finish(const at::Tensor& leaf) {
  for (auto& [place, sum] : sums_) {
    leaf.add_(sum);
    spare_.push_back(std::move(sum));
  }
  sums_.clear();
  next_ = 0;
}

SumTree SumTree::laid_out(const std::function<at::Tensor(const Place&)>& sum_at) const {
  SumTree tree;
  tree.next_ = next_;
  for (const auto& [place, sum] : sums_) tree.sums_[place] = sum_at(place);
  return tree;
}

void SumTree::write_sum(const at::Tensor& out) {
  if (sums_.empty()) {
    out.zero_();
    return;
  }
  const auto smallest = sums_.begin();
  out.copy_(smallest->second);
  spare_.push_back(std::move(smallest->second));
  sums_.erase(smallest);
  finish(out);
}

}  // namespace lockstep::parallel::detail
