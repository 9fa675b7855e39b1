// Size and checksum of a file: how a manifest knows it again.
#pragma once

#include <cstdint>
#include <string>

namespace lockstep::formats {

struct FileRecord {
  uint64_t bytes = 0;
  uint32_t crc32c = 0;

  bool operator==(const FileRecord&) const = default;
};

// Reads the whole file. SystemError where it cannot.
FileRecord record_of(const std::string& path);

}  // namespace lockstep::formats
