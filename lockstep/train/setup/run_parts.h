// SPDX-License-Identifier: Apache-2.0
// What a run derives from its configuration before its first step. Private: not installed.
#pragma once

#include <cstdint>
#include <string>

#include "lockstep/checkpoint/checkpoint.h"
#include "lockstep/comm/group.h"
#include "lockstep/config/input_files.h"
#include "lockstep/config/train_config.h"
#include "lockstep/data/tokenizer/tokenizer.h"
#include "lockstep/optim/lr_schedule.h"
#include "lockstep/plan/memory.h"

namespace lockstep::train {

optim::LrSchedule make_schedule(const config::TrainConfig& config);

// With nothing left open that a later reader of the checkpoint would have to know.
config::TrainConfig completed(config::TrainConfig config, const data::Tokenizer& tokenizer);

// Ranks that read different files would train on, each on its own. Collective.
config::DataIdentities compared(config::DataIdentities identities, const comm::Group& world);

// What copies of the run's state must have in common with the run that continues from them: all
// but the layout and the number of ranks.
std::string copy_identity(const config::TrainConfig& config,
                          const config::DataIdentities& identities, const comm::Group& world);

// Whether checkpoint.dir has a complete checkpoint of this step. Collective.
bool has_checkpoint(const config::TrainConfig& config, int64_t step, const comm::Group& world);

// Of checkpoints of this run.
checkpoint::LoadOptions load_options(const config::TrainConfig& config);

// Validation losses with the same text can be compared. `tokens` are what they are of. Empty
// without checkpoint.best.
std::string measure_of(int64_t tokens, const config::Data& data, const config::TrainConfig& config);

// Of this rank.
plan::Memory predicted(const config::TrainConfig& config, const comm::Group& world);

}  // namespace lockstep::train
