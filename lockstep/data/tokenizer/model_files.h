// SPDX-License-Identifier: Apache-2.0
// The files of a Hugging Face folder that name tokens with a meaning, such as the end of a text.
// Private: not installed.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace lockstep::data {

// What a run folder calls its copy of the model's config.json. Under its own name the run folder
// would pass for a model's folder, which `checkpoint export --force` may replace.
inline constexpr const char* kKeptModelConfig = "model_config.json";

// Paths; empty where there is no such file.
struct ModelFiles {
  std::string tokenizer_config = {};   // next to the tokenizer.json, else in the model's folder
  std::string config = {};             // in the model's folder: config.json, or a run's copy of it
  std::string generation_config = {};  // in the model's folder
};

// Of a tokenizer.json and of a model's folder. Without a folder it is that of the tokenizer.json;
// the tokenizer.json may be empty, too.
ModelFiles find_model_files(const std::string& tokenizer_json, const std::string& model_folder);

// eos_token_id of a config.json or generation_config.json: one, several, or none.
std::vector<int64_t> eos_token_ids(const std::string& path);

// The token that ends a text: eos_token of tokenizer_config.json, else eos_token_id of config.json,
// else that of generation_config.json; the first of a list. An id that no token has does not count:
// small models often have the defaults of large ones. `bytes_of` has the text of each token, by id.
// ConfigError where eos_token is no token.
std::optional<int32_t> named_end_of_text(const ModelFiles& files,
                                         const std::vector<std::string>& bytes_of);

}  // namespace lockstep::data
