// SPDX-License-Identifier: Apache-2.0
// CRC32C (Castagnoli): the checksum of every file of a checkpoint.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace lockstep::io {

// update() with the pieces of a text gives what one update() with the whole gives.
class Crc32c {
 public:
  void update(std::span<const std::byte> bytes);
  uint32_t value() const { return ~state_; }

 private:
  uint32_t state_ = ~uint32_t{0};
};

uint32_t crc32c(std::span<const std::byte> bytes);

}  // namespace lockstep::io
