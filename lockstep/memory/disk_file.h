// SPDX-License-Identifier: Apache-2.0
// The file of a DiskStore. Private: not installed.
#pragma once

#include <atomic>
#include <cstddef>
#include <span>
#include <string>

#include "lockstep/core/fd.h"
#include "lockstep/memory/arena.h"

namespace lockstep::memory::detail {

// Has no name. Reads and writes go between memory and the disk without a copy in the page cache
// where the file system can do that. By one thread, direct() by all.
class DiskFile {
 public:
  // What places in the file and buffers for reads are multiples of.
  static constexpr size_t kBlock = 4096;
  static size_t rounded(size_t bytes) { return (bytes + kBlock - 1) / kBlock * kBlock; }

  // ConfigError unless a file can be made in `folder`.
  explicit DiskFile(std::string folder);

  // Throw SystemError. What is written has rounded() bytes of the file.
  void write(std::span<const std::byte> bytes, size_t offset);
  // `bytes` is at a page's beginning, and the memory extends to rounded().
  void read(std::span<std::byte> bytes, size_t offset);
  // Gives the disk its space back.
  void discard() noexcept;

  bool direct() const { return direct_; }

 private:
  // Part of a write of `wanted` bytes.
  void write_part(std::span<const std::byte> bytes, size_t offset, size_t wanted);
  void set_direct(bool direct);

  const std::string folder_;
  const Fd file_;
  std::atomic<bool> direct_ = false;
  AddressRange bounce_;  // for memory that is not at a page's beginning
};

}  // namespace lockstep::memory::detail
