// SPDX-License-Identifier: Apache-2.0
// A file's bytes as memory.
#pragma once

#include <cstddef>
#include <span>
#include <string>

namespace lockstep {

// Read-only, and moved, not copied. The file must not shrink while it is mapped.
class MappedFile {
 public:
  MappedFile() = default;
  // Throws SystemError with the path where it cannot be read; ConfigError where it is not a file.
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;

  std::span<const std::byte> bytes() const { return bytes_; }
  size_t size() const { return bytes_.size(); }

 private:
  std::span<const std::byte> bytes_;
};

}  // namespace lockstep
