// SPDX-License-Identifier: Apache-2.0
// Trains a language model as a configuration says, with what the library offers to everyone.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "lockstep/comm/group.h"
#include "lockstep/config/train_config.h"

namespace lockstep::train {

enum class TrainingResult {
  finished,  // all steps are done
  stopped    // a signal asked for an end; a checkpoint, or copies in memory, have what was done
};

// One for each rank, all with the same configuration.
class Trainer {
 public:
  // Collective. Opens the data, builds the model, loads the checkpoint to resume from. ConfigError
  // or CheckpointError where the configuration does not fit what is found.
  Trainer(config::TrainConfig config, comm::Group group);
  ~Trainer();
  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;

  // Collective. Trains to the end, evaluates and saves, and says on rank 0's stdout how it goes.
  TrainingResult run();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace lockstep::train
