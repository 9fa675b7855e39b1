// SPDX-License-Identifier: Apache-2.0
// Parameters that are in several stages and are one. Private: not installed.
//
// The first stage that has it owns it: the optimizer updates it there. The other stages have copies
// of its value and give their gradients back.
#pragma once

#include <string>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/parallel/pipeline/stage.h"
#include "lockstep/schedule/schedule.h"

namespace lockstep::parallel::detail {

class TiedParameters {
 public:
  // `names` are parameters, `modules` are paths all of whose parameters are tied. `stages` are this
  // rank's, one for each chunk. Collective over the ranks of the pipeline, which all have the same
  // names. `timeout` is of the messages around a step. ConfigError for a parameter that no stage
  // has, for one that is in several and not tied, and for shapes that differ.
  TiedParameters(const std::vector<std::string>& names, const std::vector<std::string>& modules,
                 std::vector<Stage*> stages, const schedule::Pipeline& layout,
                 const comm::Group& group, milliseconds timeout);

  // Before a step. Collective.
  void copy_values();
  // After it. Collective.
  void return_gradients();

  bool is_copy(int chunk, const std::string& name) const;

 private:
  struct Copy {
    std::string name;  // empty on a rank that has neither of the two
    schedule::Place owner, copy;
  };

  at::Tensor find(int chunk, const std::string& name) const;

  std::vector<Stage*> stages_;
  comm::Group group_;
  milliseconds timeout_;
  std::vector<Copy> copies_;
};

}  // namespace lockstep::parallel::detail
