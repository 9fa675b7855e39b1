// SPDX-License-Identifier: Apache-2.0
// The two ways to compute CRC32C. Both take and give the register, not the final value.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lockstep::io::detail {

uint32_t crc32c_table(uint32_t state, const void* bytes, size_t size);

// Only where has_crc32c_instructions().
uint32_t crc32c_hardware(uint32_t state, const void* bytes, size_t size);
bool has_crc32c_instructions();

}  // namespace lockstep::io::detail
