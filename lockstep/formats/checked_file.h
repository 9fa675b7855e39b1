// SPDX-License-Identifier: Apache-2.0
// Reads a file of a checkpoint in blocks, and compares each with the manifest's checksum before any
// of it is given out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "lockstep/formats/safetensors_header.h"
#include "lockstep/io/file_record.h"
#include "lockstep/io/regular_file.h"

namespace lockstep::formats {

// Keeps one block, for reads that need a part of it. What is wrong with the file is a
// CheckpointError with its name. `record` must stay; without `verify` only its size is compared.
class CheckedFile {
 public:
  CheckedFile(std::string path, const io::FileRecord& record, bool verify);

  const std::string& path() const { return file_.path(); }
  // Fills `out`; blocks that go into it entirely are read right there.
  void read(uint64_t offset, std::span<std::byte> out);
  // The header of a safetensors file, all its rules checked.
  SafetensorsHeader header();

  uint64_t bytes_read() const { return bytes_read_; }  // from the disk

 private:
  void read_blocks(uint64_t block, std::span<std::byte> out);
  void compare(uint64_t block, std::span<const std::byte> bytes) const;
  std::span<const std::byte> kept(uint64_t block);

  io::RegularFile file_;
  const io::FileRecord& record_;
  bool verify_;
  std::vector<std::byte> kept_;
  uint64_t kept_block_ = 0;  // where kept_ is not empty
  uint64_t bytes_read_ = 0;
};

}  // namespace lockstep::formats
