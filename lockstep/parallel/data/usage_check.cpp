// SPDX-License-Identifier: Apache-2.0
#include "lockstep/parallel/data/usage_check.h"

#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::parallel::detail {

std::string wrong_gradients(const std::vector<std::string>& names, const char* what,
                            const std::vector<int>& ranks, int world, const char* rule) {
  std::vector<std::string> others(names.begin() + 1, names.end());
  if (others.size() > 5) {
    others.resize(5);
    others.push_back("...");
  }
  return format("[ddp] parameter {} {} on rank{} {} of {}{}; {}", names[0], what,
                ranks.size() > 1 ? "s" : "", join(ranks), world,
                others.empty() ? "" : format(" (and {} more: {})", names.size() - 1, join(others)),
                rule);
}

void UsageCheck::start() {
  if (std::exchange(listens_, true)) return;
  std::vector<at::Tensor> tensors;
  for (const Parameter& parameter : parameters_) tensors.push_back(parameter.tensor);
  rounds_.listen(tensors, weak_from_this());
}

void UsageCheck::begin_backward() {
  const std::lock_guard lock(rounds_.mutex());
  rounds_.begin_backward();
}

void UsageCheck::check_now() {
  const std::lock_guard lock(rounds_.mutex());
  for (size_t i = 0; i < parameters_.size(); ++i)
    has_gradient_[i] = parameters_[i].tensor.grad().defined();
  rounds_.run();
}

void UsageCheck::on_gradient(size_t index, bool /*is_new*/) {
  if (!parameters_[index].tensor.grad().defined()) return;
  const std::lock_guard lock(rounds_.mutex());
  has_gradient_[index] = true;
  rounds_.begin_backward();
}

void UsageCheck::close_round() {
  std::vector<std::string> unused;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    // What no_sync left may have been dropped since.
    if (!has_gradient_[i] || !parameters_[i].tensor.grad().defined())
      unused.push_back(parameters_[i].name);
  }
  drop_accumulated();
  if (!unused.empty()) throw Error(wrong_gradients(unused, kNoGradient, {0}, 1, kMayBeUnused));
}

}  // namespace lockstep::parallel::detail
