// SPDX-License-Identifier: Apache-2.0
#include "lockstep/data/tokenizer/model_files.h"

#include <algorithm>
#include <filesystem>
#include <system_error>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/input_file.h"
#include "lockstep/io/json.h"

namespace lockstep::data {
namespace {

namespace fs = std::filesystem;

std::string if_there(const fs::path& path) {
  std::error_code error;
  return fs::is_regular_file(path, error) ? path.string() : std::string();
}

// Empty where the file names none.
std::string eos_token(const std::string& path) {
  io::Json root;
  try {
    root = io::parse_json(read_text(path, io::kMaxJsonBytes), path);
  } catch (const CheckpointError& failure) {
    throw ConfigError(failure.what());
  }
  if (!root.is_object() || !root.contains("eos_token")) return {};
  const io::Json& token = root["eos_token"];
  const io::Json& content =
      token.is_object() && token.contains("content") ? token["content"] : token;
  return content.is_string() ? content.get<std::string>() : std::string();
}

// The first of them, if it is a token.
std::optional<int32_t> eos_token_id(const std::string& path,
                                    const std::vector<std::string>& bytes_of) {
  const std::vector<int64_t> ids = eos_token_ids(path);
  if (ids.empty() || ids[0] >= static_cast<int64_t>(bytes_of.size())) return std::nullopt;
  const auto token = static_cast<int32_t>(ids[0]);
  return bytes_of[static_cast<size_t>(token)].empty() ? std::nullopt : std::optional(token);
}

}  // namespace

ModelFiles find_model_files(const std::string& tokenizer_json, const std::string& model_folder) {
  const fs::path tokenizer = fs::path(tokenizer_json).parent_path();
  const fs::path model = model_folder.empty() ? tokenizer : fs::path(model_folder);
  ModelFiles files;
  if (!tokenizer_json.empty())
    files.tokenizer_config = if_there(tokenizer / "tokenizer_config.json");
  if (files.tokenizer_config.empty())
    files.tokenizer_config = if_there(model / "tokenizer_config.json");
  files.config = if_there(model / "config.json");
  if (files.config.empty()) files.config = if_there(model / kKeptModelConfig);
  files.generation_config = if_there(model / "generation_config.json");
  return files;
}

// Other programs have files of these names, too: what is not understood names none.
std::vector<int64_t> eos_token_ids(const std::string& path) {
  if (path.empty()) return {};
  const io::Json root = io::parse_json_line(read_text(path, io::kMaxJsonBytes));
  if (!root.is_object() || !root.contains("eos_token_id")) return {};
  const io::Json& given = root["eos_token_id"];
  std::vector<int64_t> ids;
  for (const io::Json& id : given.is_array() ? given : io::Json::array({given})) {
    if (id.is_number_unsigned()) ids.push_back(id.get<int64_t>());
  }
  return ids;
}

std::optional<int32_t> named_end_of_text(const ModelFiles& files,
                                         const std::vector<std::string>& bytes_of) {
  const std::string token =
      files.tokenizer_config.empty() ? std::string() : eos_token(files.tokenizer_config);
  if (!token.empty()) {
    const auto found = std::ranges::find(bytes_of, token);
    if (found != bytes_of.end()) return static_cast<int32_t>(found - bytes_of.begin());
    throw ConfigError(
        format("{}: eos_token is {}, which is no token of the tokenizer.json; name one of its "
               "tokens, or remove eos_token",
               files.tokenizer_config, token));
  }
  if (const auto id = eos_token_id(files.config, bytes_of)) return id;
  return eos_token_id(files.generation_config, bytes_of);
}

}  // namespace lockstep::data
