// SPDX-License-Identifier: Apache-2.0
// What an optimizer offers beside optim::Optimizer where it keeps its state encoded or offloaded.
#pragma once

#include <string>
#include <vector>

#include "lockstep/optim/parameters/parameters.h"

namespace lockstep::optim {

// State that is shown in staging tensors, one at a time, so that a checkpoint never needs memory
// for all of it in the form that state() has. For each name: refresh(), then read or write the
// tensor, then adopt() where it was written.
class StagedState {
 public:
  // The tensors of state(), with undefined values. They belong to the caller: their memory is freed
  // when the caller drops them.
  virtual std::vector<NamedTensor> lazy_state() = 0;
  // Fills the staging tensor of this name with the state.
  virtual void refresh(const std::string& name) = 0;
  // Takes over into the state what was written to the staging tensor after refresh().
  virtual void adopt(const std::string& name) = 0;

 protected:
  ~StagedState() = default;
};

}  // namespace lockstep::optim
