// Files and folders that are on disk when the call returns. Every failure is a SystemError with the
// path.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "lockstep/core/fd.h"
#include "lockstep/formats/crc32c.h"

namespace lockstep::formats {

// A new file, written from start to end. What was there before under this name is removed.
class DurableFile {
 public:
  explicit DurableFile(std::string path);

  void write(std::span<const std::byte> bytes);
  // Writes what is buffered and waits for the disk. The destructor does neither.
  void finish();

  const std::string& path() const { return path_; }
  // Of all bytes, after finish().
  uint64_t size() const { return written_; }
  uint32_t crc() const { return crc_.value(); }

 private:
  void flush();
  void write_out(std::span<const std::byte> bytes);

  std::string path_;
  Fd fd_;
  std::vector<std::byte> buffer_;
  uint64_t written_ = 0;
  Crc32c crc_;
};

void sync_folder(const std::string& path);
void rename_path(const std::string& from, const std::string& to);
// Makes missing parents too. A folder that is already there is fine.
void make_folders(const std::string& path);
// With everything in it; links are removed, not followed. Nothing there is fine.
void remove_tree(const std::string& path);

}  // namespace lockstep::formats
