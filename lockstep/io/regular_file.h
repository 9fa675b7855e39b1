// SPDX-License-Identifier: Apache-2.0
// A file of a checkpoint, open for reading.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "lockstep/core/fd.h"

namespace lockstep::io {

// CheckpointError where `mode` (of stat) is that of a symbolic link, or of no file at all: a
// checkpoint is what lies in its folder.
void require_regular(const std::string& path, mode_t mode);

// Not mapped: a disk that fails, or a file that shrinks, gives an error here, and a signal there.
class RegularFile {
 public:
  // SystemError where it cannot be opened; CheckpointError where it is not regular.
  explicit RegularFile(std::string path);

  const std::string& path() const { return path_; }
  uint64_t size() const { return size_; }
  // Fills `out`, which must lie inside the file. CheckpointError where the file has become shorter.
  void read(uint64_t offset, std::span<std::byte> out) const;

 private:
  std::string path_;
  Fd fd_;
  uint64_t size_ = 0;
};

}  // namespace lockstep::io
