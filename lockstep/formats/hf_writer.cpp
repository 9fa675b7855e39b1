// SPDX-License-Identifier: Apache-2.0
#include "lockstep/formats/hf_writer.h"

#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/formats/dtype_names.h"
#include "lockstep/io/durable.h"
#include "lockstep/io/json.h"

namespace lockstep::formats {
namespace {

int64_t size_in_bytes(const SafetensorsTensor& tensor) {
  const auto size = byte_size(tensor.dtype, tensor.shape);
  if (!size) {
    throw ConfigError(format("tensor {} {} {}: must be of a known type and size", tensor.name,
                             tensor.dtype, layout::describe(tensor.shape)));
  }
  return *size;
}

std::vector<std::vector<SafetensorsTensor>> into_files(
    const std::vector<SafetensorsTensor>& tensors, int64_t max_file_bytes) {
  std::vector<std::vector<SafetensorsTensor>> files(1);
  int64_t filled = 0;
  for (const SafetensorsTensor& tensor : tensors) {
    const int64_t size = size_in_bytes(tensor);
    if (!files.back().empty() && size > max_file_bytes - filled) {
      files.emplace_back();
      filled = 0;
    }
    files.back().push_back(tensor);
    filled += size;
  }
  return files;
}

}  // namespace

HfFiles write_hf_model(const std::string& folder, const std::vector<SafetensorsTensor>& tensors,
                       const ByteSource& source, int64_t max_file_bytes) {
  if (max_file_bytes < 1) {
    throw ConfigError(
        format("[write_hf_model] files of {} bytes, must be at least 1", max_file_bytes));
  }
  const auto files = into_files(tensors, max_file_bytes);
  HfFiles written{.files = static_cast<int64_t>(files.size())};
  io::Json weight_map = io::Json::object();
  for (size_t i = 0; i < files.size(); ++i) {
    const std::string name = files.size() == 1
                                 ? "model.safetensors"
                                 : format("model-{:05}-of-{:05}.safetensors", i + 1, files.size());
    SafetensorsWriter writer(folder + "/" + name, files[i]);
    const auto entries = writer.entries();
    for (const SafetensorsEntry& entry : entries) {
      source(entry.name,
             [&](std::span<const std::byte> bytes) { writer.write(entry.name, bytes); });
      weight_map[entry.name] = name;
      written.bytes += static_cast<int64_t>(entry.size());
    }
    writer.finish();
  }
  if (files.size() > 1) {
    const io::Json index = {{"metadata", {{"total_size", written.bytes}}},
                            {"weight_map", weight_map}};
    io::write_text(folder + "/model.safetensors.index.json", index.dump(2) + "\n");
  }
  return written;
}

}  // namespace lockstep::formats
