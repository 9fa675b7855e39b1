// SPDX-License-Identifier: Apache-2.0
// Files and folders that are on disk when the call returns. Every failure is a SystemError with the
// path.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/core/fd.h"
#include "lockstep/io/file_record.h"

namespace lockstep::io {

// A new file, written from start to end. What was there before under this name is removed.
class DurableFile {
 public:
  // The disk sets `size` bytes aside where it can, so that a full one is noticed before they come.
  explicit DurableFile(std::string path, uint64_t size = 0);

  void write(std::span<const std::byte> bytes);
  // Writes what is buffered and waits for the disk. The destructor does neither.
  FileRecord finish();

  const std::string& path() const { return path_; }

 private:
  void keep(std::span<const std::byte> bytes);
  void write_block(std::span<const std::byte> bytes);

  std::string path_;
  Fd fd_;
  std::vector<std::byte> buffer_;  // the block that is not full yet
  FileRecord record_;              // of what is written
  uint64_t started_ = 0;           // bytes that the disk was told to write
};

// A new file with this text.
void write_text(const std::string& path, std::string_view text);
void sync_folder(const std::string& path);
void rename_path(const std::string& from, const std::string& to);
// A symbolic link at `path` to `target`, in place of a link that was there.
void replace_link(const std::string& target, const std::string& path);
// Makes missing parents too. A folder that is already there is fine.
void make_folders(const std::string& path);
// With everything in it; links are removed, not followed. Nothing there is fine.
void remove_tree(const std::string& path);

}  // namespace lockstep::io
