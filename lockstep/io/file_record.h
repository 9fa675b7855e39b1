// SPDX-License-Identifier: Apache-2.0
// Size and checksums of a file: how a manifest knows it again.
#pragma once

#include <cstdint>
#include <vector>

namespace lockstep::io {

// A checksum is of so many bytes, the last one of a file of what is left: a reader compares those
// of the blocks that it reads, and no more.
constexpr uint64_t kBlockBytes = uint64_t{1} << 20;

constexpr uint64_t num_blocks(uint64_t bytes) {
  return bytes / kBlockBytes + (bytes % kBlockBytes != 0 ? 1 : 0);
}

struct FileRecord {
  uint64_t bytes = 0;
  std::vector<uint32_t> blocks = {};  // CRC32C of each

  bool operator==(const FileRecord&) const = default;
};

}  // namespace lockstep::io
