// SPDX-License-Identifier: Apache-2.0
// Text that a model writes while it is trained. Private: not installed.
#pragma once

#include <cstdint>
#include <string>

#include "lockstep/comm/group.h"
#include "lockstep/config/train_config.h"
#include "lockstep/data/tokenizer/tokenizer.h"
#include "lockstep/train/trained_model.h"

namespace lockstep::train {

// metrics.sample_tokens tokens after metrics.sample_prompt, drawn by numbers that depend on the
// seed alone: where the logits are the same, so is the text, in every layout. Each token takes one
// forward pass of a whole sequence, because a model that is trained has no cache. Collective.
std::string sample_text(TrainedModel& model, const config::TrainConfig& config,
                        const data::Tokenizer& tokenizer, c10::Device device,
                        const comm::Group& world);

}  // namespace lockstep::train
