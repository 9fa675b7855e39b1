// SPDX-License-Identifier: Apache-2.0
// Which model `lockstep sample` and `lockstep eval` compute with, and how ranks share it.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "lockstep/cli/common/options.h"
#include "lockstep/config/run_tokenizer.h"
#include "lockstep/config/train_config.h"
#include "lockstep/formats/manifest.h"

namespace lockstep::cli {

struct ModelOptions {
  std::string checkpoint = {};  // as given: a checkpoint, a folder of them, a Hugging Face folder
  std::string tokenizer = {};   // empty: the one that the model was trained with
  int ranks = 0;                // -n; 0: those of the launcher, or one
  // The flags --parallel.*, --offload.*, --memory.*, --comm.*, and some of --train.*.
  std::vector<std::pair<std::string, std::string>> layout = {};

  std::string path = {};    // of the complete checkpoint, or of the folder
  std::string choice = {};  // which checkpoint of a folder it is, for people; empty: it was named
  bool is_hugging_face = false;
};

// Takes the words of the layout out of the arguments, and -n. ConfigError for keys that these
// commands do not have.
std::vector<std::string> take_layout(const std::vector<std::string>& arguments,
                                     const std::string& command, ModelOptions& options);
// What --help says of them.
extern const char* const kLayoutHelp;

// --checkpoint and --tokenizer.
void add_model_options(CLI::App& app, ModelOptions& options);

// Fills path and choice. ConfigError where there is no model.
void find_model(ModelOptions& options);

struct ModelSource {
  config::TrainConfig config = {};   // the model, how ranks share it, and the tokenizer
  config::TrainConfig trained = {};  // of the run that has trained it; defaults for a folder
  std::optional<formats::Manifest> manifest = std::nullopt;  // of a checkpoint
};

// Looks into the files.
ModelSource open_model(const ModelOptions& options);

// The tokenizer, and the files that name the end of text and how text is drawn. A tokenizer with
// more tokens than the model is a ConfigError.
struct ModelTokenizer {
  data::Tokenizer tokenizer;
  data::ModelFiles files;
};
ModelTokenizer open_tokenizer(const ModelOptions& options, const ModelSource& source);

}  // namespace lockstep::cli
