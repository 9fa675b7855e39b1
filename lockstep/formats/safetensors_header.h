// The header of a safetensors file: text to entries and back.
#pragma once

#include <cstddef>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "lockstep/formats/safetensors.h"

namespace lockstep::formats {

struct SafetensorsHeader {
  std::vector<SafetensorsEntry> entries;  // in the order of their bytes
  std::map<std::string, std::string> metadata;
  size_t data_begin = 0;  // in the file
};

// From the bytes of a whole file, all rules checked. `path` is for messages.
SafetensorsHeader parse_safetensors(std::span<const std::byte> file, const std::string& path);

// The first bytes of a file, up to its data. Entries must be in file order.
std::string safetensors_header_text(std::span<const SafetensorsEntry> entries,
                                    const std::map<std::string, std::string>& metadata);

}  // namespace lockstep::formats
