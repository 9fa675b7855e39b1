// SPDX-License-Identifier: Apache-2.0
#include "lockstep/config/run_tokenizer.h"

#include <filesystem>
#include <optional>
#include <span>
#include <system_error>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/input_file.h"
#include "lockstep/core/log.h"
#include "lockstep/io/crc32c.h"
#include "lockstep/io/durable.h"
#include "lockstep/io/json.h"

namespace lockstep::config {
namespace {

namespace fs = std::filesystem;

constexpr const char* kTokenizer = "tokenizer.json";

std::string tokenizer_file_of(const std::string& name) {
  std::error_code error;
  return fs::is_directory(name, error) ? name + "/" + kTokenizer : name;
}

std::string crc_text(const std::string& text) {
  return format("{:08x}", io::crc32c(std::as_bytes(std::span(text))));
}

// None where there is no such file.
std::optional<std::string> crc_of(const std::string& file) {
  std::error_code error;
  if (!fs::is_regular_file(file, error)) return std::nullopt;
  return crc_text(read_text(file, io::kMaxJsonBytes));
}

// model.path, if the ids in its files are those of this tokenizer: it has the same, or none.
std::string model_of(const std::string& tokenizer, const std::string& model_path) {
  if (model_path.empty() || tokenizer == "bytes") return {};
  const auto own = crc_of(format("{}/{}", model_path, kTokenizer));
  return !own || *own == tokenizer_crc(tokenizer) ? model_path : std::string();
}

void keep_file(const std::string& from, const std::string& to) {
  if (!from.empty()) io::write_text(to, read_text(from, io::kMaxJsonBytes));
}

void keep_files(const data::ModelFiles& files, const std::string& place) {
  keep_file(files.tokenizer_config, place + "/tokenizer_config.json");
  keep_file(files.config, format("{}/{}", place, data::kKeptModelConfig));
  keep_file(files.generation_config, place + "/generation_config.json");
}

std::string run_folder_of(const std::string& checkpoint) {
  const fs::path path = fs::absolute(checkpoint).lexically_normal();
  const fs::path folder = path.has_filename() ? path : path.parent_path();
  return folder.parent_path().parent_path().string();
}

std::string with_crc(const std::string& name, const std::string& crc) {
  return crc.empty() ? name : format("{} (crc32c {})", name, crc);
}

constexpr const char* kEffect = "the same token may stand for other text";

}  // namespace

std::string tokenizer_name(const TrainConfig& config) {
  const std::string& name = config.data.tokenizer;
  if (name == "bytes") return name;
  if (name != "auto") return fs::absolute(name).string();
  const std::string own = format("{}/{}", config.model_path, kTokenizer);
  return !config.model_path.empty() && fs::exists(own) ? fs::absolute(own).string() : "bytes";
}

data::Tokenizer open_tokenizer(const TrainConfig& config) {
  const std::string name = tokenizer_name(config);
  return data::Tokenizer::open(name, model_of(name, config.model_path));
}

std::string tokenizer_crc(const std::string& name) {
  return name == "bytes" ? "" : crc_of(tokenizer_file_of(name)).value_or("");
}

std::string tokenizer_crc(const formats::Manifest& manifest, const std::string& checkpoint) {
  const auto found = manifest.state.find("tokenizer");
  if (found == manifest.state.end()) return {};
  const std::string origin = checkpoint + ": state tokenizer";
  return io::string_member(io::parse_json(found->second, origin), "crc32c", origin);
}

std::optional<std::string> kept_tokenizer(const std::string& run_folder, const std::string& crc) {
  for (const std::string& place : {run_folder, format("{}/tokenizer-{}", run_folder, crc)}) {
    const std::string file = format("{}/{}", place, kTokenizer);
    if (crc_of(file) == crc) return file;
  }
  return std::nullopt;
}

void keep_tokenizer(const TrainConfig& config, const std::string& run_folder) {
  const std::string name = tokenizer_name(config);
  if (name == "bytes") {
    // Token files for a model without a tokenizer: its ids hold all the same.
    if (config.data.tokenizer == "auto" && !config.model_path.empty())
      keep_files(data::find_model_files("", config.model_path), run_folder);
    return;
  }
  const std::string file = tokenizer_file_of(name), text = read_text(file, io::kMaxJsonBytes);
  const std::string crc = crc_text(text);
  if (kept_tokenizer(run_folder, crc)) return;
  std::string place = run_folder;
  std::error_code error;
  if (fs::exists(format("{}/{}", run_folder, kTokenizer), error))
    place += format("/tokenizer-{}", crc);
  io::make_folders(place);
  keep_files(data::find_model_files(file, model_of(name, config.model_path)), place);
  const std::string temporary = format("{}/{}.tmp", place, kTokenizer);
  io::write_text(temporary, text);
  io::rename_path(temporary, format("{}/{}", place, kTokenizer));
}

SavedTokenizer saved_tokenizer(const formats::Manifest& manifest, const std::string& checkpoint) {
  const TrainConfig config = train_config_from_json(manifest.config, checkpoint);
  const std::string& name = config.data.tokenizer;
  const std::string folder = run_folder_of(checkpoint), crc = tokenizer_crc(manifest, checkpoint);
  std::error_code error;
  if (name == "bytes" || name == "auto") {
    // Another folder than a run's may have a config.json that has nothing to do with it.
    const bool kept = fs::exists(format("{}/{}", folder, data::kKeptModelConfig), error);
    return {name, "", kept ? data::find_model_files("", folder) : data::ModelFiles{}};
  }
  if (const auto copy = crc.empty() ? std::nullopt : kept_tokenizer(folder, crc))
    return {*copy, "", data::find_model_files(*copy, "")};
  if (const auto now = crc_of(tokenizer_file_of(name)); !crc.empty() && now && now != crc) {
    log::warn(format("{} was trained with another tokenizer than {} has now (crc32c {}, now {})",
                     checkpoint, name, crc, *now));
  }
  const std::string model = model_of(name, config.model_path);
  return {name, model, data::find_model_files(tokenizer_file_of(name), model)};
}

void warn_of_other_tokenizer(const formats::Manifest& manifest, const std::string& checkpoint,
                             const std::string& name) {
  std::string before;
  try {
    before = train_config_from_json(manifest.config, checkpoint).data.tokenizer;
  } catch (const ConfigError&) {  // a checkpoint of another program
  }
  if (before.empty() || before == "auto") return;
  const std::string saved = tokenizer_crc(manifest, checkpoint);
  const std::string crc = saved.empty() ? tokenizer_crc(before) : saved;
  const std::string now = tokenizer_crc(name);
  if (crc.empty() || now.empty() ? before == name : crc == now) return;
  log::warn(format("{} was written with data.tokenizer {}, now it is {}: {}", checkpoint,
                   with_crc(before, crc), with_crc(name, now), kEffect));
}

void warn_of_other_tokenizer(const TrainConfig& config) {
  if (config.model_path.empty()) return;
  const std::string own = format("{}/{}", config.model_path, kTokenizer);
  const std::string name = tokenizer_name(config), now = tokenizer_crc(name);
  const auto crc = crc_of(own);
  if (!crc || *crc == now) return;
  log::warn(format("model.path has the tokenizer {}, but data.tokenizer is {}: {}",
                   with_crc(own, *crc), with_crc(name, now), kEffect));
}

}  // namespace lockstep::config
