// SPDX-License-Identifier: Apache-2.0
#include "lockstep/io/file_record.h"

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

#include "lockstep/io/crc32c.h"
#include "lockstep/io/regular_file.h"

namespace lockstep::io {

FileRecord record_of(const std::string& path) {
  const RegularFile file(path);
  FileRecord record{.bytes = file.size()};
  std::vector<std::byte> block(kBlockBytes);
  for (uint64_t begin = 0; begin < record.bytes; begin += kBlockBytes) {
    const auto bytes = std::span(block).first(std::min(kBlockBytes, record.bytes - begin));
    file.read(begin, bytes);
    record.blocks.push_back(crc32c(bytes));
  }
  return record;
}

}  // namespace lockstep::io
