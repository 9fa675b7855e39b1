// SPDX-License-Identifier: Apache-2.0
#include "lockstep/parallel/shard/unit_order.h"

#include <algorithm>

namespace lockstep::parallel::detail {

bool UnitOrder::use(Phase phase, size_t unit) {
  const Visit visit{phase, unit};
  if (current_ == visit) {
    ++operators_;
    return false;
  }
  if (current_) experience_[{before_, *current_}] = {visit, operators_};
  before_ = current_;
  current_ = visit;
  operators_ = 1;
  return true;
}

void UnitOrder::end_pass() {
  if (current_) experience_[{before_, *current_}] = {std::nullopt, operators_};
  before_.reset();
  current_.reset();
  operators_ = 0;
}

std::vector<size_t> UnitOrder::ahead(int depth) const {
  std::vector<size_t> units;
  if (!current_) return units;
  Context context{before_, *current_};
  // The chain may go in circles, and through units that are already on the list.
  for (int step = 0; step < 2 * depth && units.size() < static_cast<size_t>(depth); ++step) {
    const auto found = experience_.find(context);
    if (found == experience_.end() || !found->second.next) break;
    const Visit next = *found->second.next;
    if (next.second != current_->second &&
        std::find(units.begin(), units.end(), next.second) == units.end())
      units.push_back(next.second);
    context = {context.second, next};
  }
  return units;
}

bool UnitOrder::stays() const {
  if (!current_) return false;
  const auto found = experience_.find({before_, *current_});
  return found != experience_.end() && found->second.next &&
         found->second.next->second == current_->second;
}

bool UnitOrder::visit_is_over() const {
  if (!current_) return false;
  const auto found = experience_.find({before_, *current_});
  return found != experience_.end() && found->second.operators == operators_;
}

bool UnitOrder::visit_may_be_over() const {
  if (!current_) return true;
  auto found = experience_.find({before_, *current_});
  if (found == experience_.end()) {
    // An evaluation uses units as the forward of a step does.
    Context trained{before_, {Phase::forward, current_->second}};
    if (trained.first) trained.first->first = Phase::forward;
    found = experience_.find(trained);
  }
  return found == experience_.end() || operators_ >= found->second.operators;
}

}  // namespace lockstep::parallel::detail
