// SPDX-License-Identifier: Apache-2.0
// libFuzzer: any text with a right checksum is a manifest that holds together, or a
// CheckpointError.
// cmake -DLOCKSTEP_FUZZ=ON -DCMAKE_CXX_COMPILER=clang++ -DLOCKSTEP_TORCH=OFF; bin/manifest_fuzz
// -max_total_time=60
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <span>
#include <string>

#include "lockstep/core/error.h"
#include "lockstep/formats/manifest.h"
#include "lockstep/io/crc32c.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using lockstep::formats::Manifest;
  std::string text(reinterpret_cast<const char*>(data), size);
  char seal[40];
  std::snprintf(seal, sizeof seal, ",\n\"crc32c\": \"%08x\"\n}\n",
                lockstep::io::crc32c(std::as_bytes(std::span(text))));
  text += seal;
  try {
    const auto manifest = Manifest::from_json(text, "f");
    if (Manifest::from_json(manifest.to_json(), "f") != manifest) __builtin_trap();
  } catch (const lockstep::CheckpointError&) {
  }
  return 0;
}
