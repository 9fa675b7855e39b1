// SPDX-License-Identifier: Apache-2.0
// libFuzzer: any bytes are a safetensors file that keeps all rules, or a CheckpointError.
// cmake -DLOCKSTEP_FUZZ=ON -DCMAKE_CXX_COMPILER=clang++ -DLOCKSTEP_TORCH=OFF; bin/safetensors_fuzz
// -max_total_time=60
#include <cstddef>
#include <cstdint>
#include <span>

#include "lockstep/core/error.h"
#include "lockstep/formats/safetensors_header.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto file = std::as_bytes(std::span(data, size));
  try {
    const auto header = lockstep::formats::parse_safetensors(file, size, "f");
    if (!header.entries.empty() && header.data_begin + header.entries.back().end != size) {
      __builtin_trap();
    }
  } catch (const lockstep::CheckpointError&) {
  }
  return 0;
}
