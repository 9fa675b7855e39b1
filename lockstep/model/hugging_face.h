// SPDX-License-Identifier: Apache-2.0
// Weights as Hugging Face keeps them.
#pragma once

#include <string>

#include "lockstep/model/language_model.h"

namespace lockstep::model {

// Fills the model's parameters from a folder with model.safetensors, or an index and several files,
// converting to the parameters' dtype. CheckpointError for tensors that are missing or of another
// shape. The spec is that of the folder: config::model_spec_from_hf.
void load_hugging_face(LanguageModelImpl& model, const std::string& folder);
// The same for one parameter at a time: a rule that fills the parameter of the source's name.
nn::InitializeRule hugging_face_values(const config::ModelSpec& spec, const std::string& folder);

}  // namespace lockstep::model
