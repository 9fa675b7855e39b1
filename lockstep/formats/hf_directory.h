// SPDX-License-Identifier: Apache-2.0
// A model as the Hugging Face libraries keep it: model.safetensors, or model.safetensors.index.json
// and the files it names.
#pragma once

#include <cstddef>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/formats/safetensors.h"
#include "lockstep/layout/box.h"

namespace lockstep::formats {

// Views of a mapped file, good as long as its HfDirectory.
struct HfTensor {
  std::string_view dtype;  // "F32"
  const layout::Shape& shape;
  std::span<const std::byte> bytes;
};

// Files are opened when first needed, once. Not for several threads at a time. What is wrong with
// the folder or its files is a CheckpointError with the file's name.
class HfDirectory {
 public:
  explicit HfDirectory(std::string path);

  bool contains(std::string_view name) const { return files_.find(name) != files_.end(); }
  std::vector<std::string> names() const;  // sorted
  // CheckpointError where there is no such tensor.
  HfTensor find(std::string_view name);

 private:
  const SafetensorsFile& open(const std::string& file);

  std::string path_;
  std::map<std::string, std::string, std::less<>> files_;  // by tensor
  std::map<std::string, SafetensorsFile> open_;
};

}  // namespace lockstep::formats
