// SPDX-License-Identifier: Apache-2.0
// The header of a safetensors file: text to entries and back.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "lockstep/formats/safetensors.h"

namespace lockstep::formats {

struct SafetensorsHeader {
  std::vector<SafetensorsEntry> entries;  // in the order of their bytes
  std::map<std::string, std::string> metadata;
  uint64_t data_begin = 0;  // in the file
};

// Where the data of a file of `size` bytes begins: its first 8 bytes say it.
uint64_t safetensors_data_begin(std::span<const std::byte> first, uint64_t size,
                                const std::string& path);

// From the bytes of a file up to its data, or more of it, all rules checked against the file's
// size. `path` is for messages.
SafetensorsHeader parse_safetensors(std::span<const std::byte> head, uint64_t size,
                                    const std::string& path);

// The first bytes of a file, up to its data. Entries must be in file order.
std::string safetensors_header_text(std::span<const SafetensorsEntry> entries,
                                    const std::map<std::string, std::string>& metadata);

}  // namespace lockstep::formats
