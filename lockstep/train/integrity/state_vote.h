// SPDX-License-Identifier: Apache-2.0
// Finds memory that changed on one rank: ranks that hold the same slice of a model or of its
// optimizer compare checksums of it, and the majority is right. Private: not installed.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/checkpoint/slices.h"
#include "lockstep/comm/group.h"
#include "lockstep/config/train_config.h"

namespace lockstep::train {

// All functions are collective, and what they throw all ranks throw.
class StateVote {
 public:
  StateVote(comm::Group world, config::OnCorruption on_corruption)
      : world_(std::move(world)), on_corruption_(on_corruption) {}

  // Between the update of a step and the next step. Where holders of a slice differ: Error that
  // names the ranks, or a warning once the majority's bits are where they belong, and true. What
  // may differ between ranks (buffers) is not compared. The slices are those of the whole run.
  bool verify(int64_t step, const std::vector<checkpoint::NamedSlice>& slices);

 private:
  struct Item {
    std::string what;          // name and slice
    std::vector<int> holders;  // ranks, at least two
    int64_t mine = -1;         // which of this rank's slices; none: -1
  };
  struct Split {
    const Item* item;
    std::vector<int> majority, others;  // majority is empty where there is none
    std::vector<std::string> camps;     // "ranks 0, 1"
  };
  void find_holders(const std::vector<checkpoint::NamedSlice>& slices);
  std::vector<Split> compare(const std::vector<checkpoint::NamedSlice>& slices) const;
  void repair(const std::vector<Split>& splits,
              const std::vector<checkpoint::NamedSlice>& slices) const;

  comm::Group world_;
  config::OnCorruption on_corruption_;
  bool found_holders_ = false;
  std::vector<Item> items_;  // the same on all ranks but for `mine`
};

}  // namespace lockstep::train
