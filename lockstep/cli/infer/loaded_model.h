// SPDX-License-Identifier: Apache-2.0
// A model with its weights on the ranks of a job, for `lockstep sample` and `lockstep eval`.
#pragma once

#include <memory>
#include <string>

#include "lockstep/cli/infer/model_options.h"
#include "lockstep/comm/group.h"
#include "lockstep/model/text_model.h"
#include "lockstep/train/trained_model.h"

namespace lockstep::cli {

struct LoadedModel {
  comm::Group world;
  c10::Device device;
  std::shared_ptr<model::Decoding> decoding;
  train::TrainedModel model;
  std::unique_ptr<model::TextModel> text;
  // Data-parallel ranks may compute different numbers of texts. Ranks that gather parameters for
  // each use compute all texts together.
  bool splits;
  comm::Group patient;  // of the world: who has less text to compute waits for the others
};

// Collective.
LoadedModel load_model(const ModelOptions& options, const ModelSource& source);

}  // namespace lockstep::cli
