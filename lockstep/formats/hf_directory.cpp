// SPDX-License-Identifier: Apache-2.0
#include "lockstep/formats/hf_directory.h"

#include <filesystem>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/input_file.h"
#include "lockstep/formats/manifest.h"
#include "lockstep/io/json.h"

namespace lockstep::formats {
namespace {

constexpr const char* kSingle = "model.safetensors";
constexpr const char* kIndex = "model.safetensors.index.json";

}  // namespace

HfDirectory::HfDirectory(std::string path) : path_(std::move(path)) {
  namespace fs = std::filesystem;
  std::error_code error;
  if (fs::exists(path_ + "/" + kSingle, error)) {
    for (const auto& entry : open(kSingle).entries()) files_.emplace(entry.name, kSingle);
    return;
  }
  const auto index = path_ + "/" + kIndex;
  if (!fs::exists(index, error)) {
    throw CheckpointError(format("{}: has neither {} nor {}", path_, kSingle, kIndex));
  }
  const auto json = io::parse_json(read_text(index, io::kMaxJsonBytes), index);
  for (const auto& [name, file] : io::object_member(json, "weight_map", index).items()) {
    if (!file.is_string() || !is_plain_file_name(file.get_ref<const std::string&>())) {
      throw CheckpointError(
          format("{}: tensor {}: {} must be the plain name of a file in the folder", index, name,
                 file.dump()));
    }
    files_.emplace(name, file.get<std::string>());
  }
}

std::vector<std::string> HfDirectory::names() const {
  std::vector<std::string> names;
  for (const auto& [name, file] : files_) names.push_back(name);
  return names;
}

HfTensor HfDirectory::find(std::string_view name) {
  const auto found = files_.find(name);
  if (found == files_.end()) {
    throw CheckpointError(format("{}: has no tensor {} among its {}", path_, name, files_.size()));
  }
  const auto& file = open(found->second);
  const auto& entry = file.at(name);
  return {entry.dtype, entry.shape, file.bytes(entry)};
}

const SafetensorsFile& HfDirectory::open(const std::string& file) {
  const auto found = open_.find(file);
  if (found != open_.end()) return found->second;
  return open_.emplace(file, SafetensorsFile(path_ + "/" + file)).first->second;
}

}  // namespace lockstep::formats
