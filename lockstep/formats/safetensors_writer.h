// SPDX-License-Identifier: Apache-2.0
// Writes safetensors files, byte for byte as the reference implementation does.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/formats/safetensors.h"
#include "lockstep/io/file_record.h"
#include "lockstep/layout/box.h"

namespace lockstep::io {
class DurableFile;
}

namespace lockstep::formats {

struct SafetensorsTensor {
  std::string name;
  std::string dtype;  // "F32": safetensors_name(DType) of dtype_names.h
  layout::Shape shape;
};

// All tensors are named first; then their bytes follow, in the order of entries(), in pieces of any
// size; then finish(). Failures of the disk are SystemErrors with the path. What is destroyed
// before finish() leaves part of a file: write where no reader looks (checkpoint_folder.h).
class SafetensorsWriter {
 public:
  SafetensorsWriter(std::string path, std::vector<SafetensorsTensor> tensors,
                    const std::map<std::string, std::string>& metadata = {{"format", "pt"}});
  ~SafetensorsWriter();
  SafetensorsWriter(SafetensorsWriter&&) noexcept;
  SafetensorsWriter& operator=(SafetensorsWriter&&) noexcept;

  // File order: wide types first, then by name.
  const std::vector<SafetensorsEntry>& entries() const { return entries_; }

  // The next bytes of `name`. ConfigError where another tensor's bytes are due, or too many come.
  void write(std::string_view name, std::span<const std::byte> bytes);

  // The file is on disk when this returns. ConfigError where bytes are missing.
  io::FileRecord finish();

 private:
  void skip_written();

  std::vector<SafetensorsEntry> entries_;
  std::unique_ptr<io::DurableFile> file_;
  size_t current_ = 0;    // the tensor whose bytes are due
  uint64_t written_ = 0;  // of all tensors
};

}  // namespace lockstep::formats
