// SPDX-License-Identifier: Apache-2.0
// A file that a user names, open for reading.
#pragma once

#include <sys/stat.h>
#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"

namespace lockstep {

// Opens a file for reading, and never waits: a pipe, a device, a socket or a folder under this name
// is a ConfigError, and what cannot be opened a SystemError, both with the path.
Fd open_input(const std::string& path, struct stat& status);

// A file has changed while it was in use: restore it, and start again.
class DataError : public Error {
 public:
  using Error::Error;
};

// Moved, not copied. Not mapped: a file that shrinks, or a disk that fails, gives an error here and
// a signal there. May be read by several threads.
class InputFile {
 public:
  InputFile() = default;
  // By open_input().
  explicit InputFile(std::string path);

  const std::string& path() const { return path_; }
  uint64_t size() const { return size_; }         // when it was opened
  int64_t modified() const { return modified_; }  // then, in seconds since 1970
  // Fills `out`. DataError where the file ends before that; SystemError where it cannot be read.
  void read(uint64_t offset, std::span<std::byte> out) const;

  // A descriptor less; read() opens the file again each time. DataError where another file is under
  // the name by then.
  void close() { fd_.reset(); }

 private:
  Fd opened() const;

  std::string path_;
  Fd fd_;
  uint64_t size_ = 0;
  int64_t modified_ = 0;
  dev_t device_ = 0;
  ino_t inode_ = 0;
  int64_t birth_ = 0;
};

// The whole file, of which there may be `most` bytes: ConfigError where there are more.
std::string read_text(const std::string& path, uint64_t most);

}  // namespace lockstep
