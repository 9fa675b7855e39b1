// SPDX-License-Identifier: Apache-2.0
// Reads safetensors files: named tensors, plain bytes, as every other program reads them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/core/mapped_file.h"
#include "lockstep/layout/box.h"

namespace lockstep::formats {

struct SafetensorsEntry {
  std::string name;
  std::string dtype;  // "F32"; dtype_names.h knows Lockstep's
  layout::Shape shape;
  uint64_t begin = 0, end = 0;  // bytes of the data, which starts after the header

  uint64_t size() const { return end - begin; }
  bool operator==(const SafetensorsEntry&) const = default;
};

// An open file, mapped. All rules of the format are checked when it is opened, before anything is
// believed: CheckpointError with the file, the tensor, the numbers and the rule. Constant after
// that, so any thread may read. The file must not shrink while it is open.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::string& path);

  const std::string& path() const { return path_; }
  // In file order.
  const std::vector<SafetensorsEntry>& entries() const { return entries_; }
  // Null where the file has no such tensor.
  const SafetensorsEntry* find(std::string_view name) const;
  // As find(), but throws CheckpointError.
  const SafetensorsEntry& at(std::string_view name) const;
  // Row-major, little-endian. Aligned for the type in files whose writer took care, as ours does.
  std::span<const std::byte> bytes(const SafetensorsEntry& entry) const;
  const std::map<std::string, std::string>& metadata() const { return metadata_; }

 private:
  std::string path_;
  MappedFile file_;
  std::vector<SafetensorsEntry> entries_;
  std::map<std::string, size_t, std::less<>> index_;  // name to place in entries_
  std::map<std::string, std::string> metadata_;
  std::span<const std::byte> data_;
};

}  // namespace lockstep::formats
