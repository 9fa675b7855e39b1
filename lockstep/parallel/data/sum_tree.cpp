#include "lockstep/parallel/data/sum_tree.h"

#include <utility>

namespace lockstep::parallel::detail {

void SumTree::push(const at::Tensor& leaf) {
  if (levels_.empty() || !levels_[0].defined()) {
    if (levels_.empty()) levels_.emplace_back();
    if (spare_.empty()) {
      levels_[0] = leaf.clone();
    } else {
      levels_[0] = std::exchange(spare_.back(), {}).copy_(leaf);
      spare_.pop_back();
    }
    return;
  }
  at::Tensor carry = std::exchange(levels_[0], {}).add_(leaf);
  for (size_t level = 1;; ++level) {
    if (level == levels_.size()) levels_.emplace_back();
    if (!levels_[level].defined()) {
      levels_[level] = std::move(carry);
      return;
    }
    at::Tensor sum = std::exchange(levels_[level], {}).add_(carry);
    spare_.push_back(std::exchange(carry, std::move(sum)));
  }
}

void SumTree::finish(const at::Tensor& leaf) {
  for (at::Tensor& level : levels_) {
    if (!level.defined()) continue;
    leaf.add_(level);
    spare_.push_back(std::exchange(level, {}));
  }
}

}  // namespace lockstep::parallel::detail
