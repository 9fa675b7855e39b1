// SPDX-License-Identifier: Apache-2.0
// The tokenizer of a run and of its checkpoints, and the files of the model that name its end of
// text. A run folder has copies of them:
//
//   tokenizer.json          the tokenizer
//   tokenizer_config.json   from the folder of the tokenizer, or of the model
//   model_config.json       the config.json of the model
//   generation_config.json  from the folder of the model
//
// Private: not installed.
#pragma once

#include <optional>
#include <string>

#include "lockstep/config/train_config.h"
#include "lockstep/data/tokenizer/model_files.h"
#include "lockstep/data/tokenizer/tokenizer.h"
#include "lockstep/formats/manifest.h"

namespace lockstep::config {

// data.tokenizer with nothing left open: "bytes", or an absolute path.
std::string tokenizer_name(const TrainConfig& config);
// That tokenizer, with the end of text that the model's files name.
data::Tokenizer open_tokenizer(const TrainConfig& config);

// A tokenizer is known by the CRC32C of its file, which checkpoints keep; empty for "bytes".
std::string tokenizer_crc(const std::string& name);
std::string tokenizer_crc(const formats::Manifest& manifest, const std::string& checkpoint);

// Copies it and the model's files into a run folder. A second tokenizer gets a folder of its own
// there: older checkpoints still need the first.
void keep_tokenizer(const TrainConfig& config, const std::string& run_folder);
// The copy there of the tokenizer with this CRC32C; none where there is none.
std::optional<std::string> kept_tokenizer(const std::string& run_folder, const std::string& crc);

struct SavedTokenizer {
  std::string name;          // "bytes", or a path
  std::string model_folder;  // for data::Tokenizer::open(); may be empty
  data::ModelFiles files;
};

// The tokenizer that a checkpoint was trained with: the copy in its run folder, or the path that
// was used, with a warning where the file there is another one by now.
SavedTokenizer saved_tokenizer(const formats::Manifest& manifest, const std::string& checkpoint);

// A warning with both names and checksums where this tokenizer is not the one that a checkpoint was
// trained with, or not that of the model in model.path.
void warn_of_other_tokenizer(const formats::Manifest& manifest, const std::string& checkpoint,
                             const std::string& name);
void warn_of_other_tokenizer(const TrainConfig& config);

}  // namespace lockstep::config
