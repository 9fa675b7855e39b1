// SPDX-License-Identifier: Apache-2.0
// Tags under which Gloo's calls of different ranks meet only if they are of the same operation.
// Private to gloo/.
#pragma once

#include <cstdint>

#include "lockstep/fabric/operation.h"

namespace lockstep::comm::gloo {

// What an operation is, in 14 bits.
inline uint32_t fingerprint(const fabric::Operation& operation) {
  const fabric::Signature signature = fabric::signature_of(operation);
  uint64_t hash = 14695981039346656037ull;
  const auto mix = [&hash](uint64_t value) { hash = (hash ^ value) * 1099511628211ull; };
  mix(static_cast<uint64_t>(signature.kind));
  mix(static_cast<uint64_t>(signature.reduce));
  mix(static_cast<uint64_t>(signature.dtype));
  mix(static_cast<uint64_t>(signature.root));
  mix(static_cast<uint64_t>(signature.count));
  mix(signature.counts_hash);
  for (const char byte : signature.tag) mix(static_cast<unsigned char>(byte));
  return static_cast<uint32_t>((hash >> 40) ^ (hash >> 20)) & 0x3fff;
}

// Other than that of any operation nearby, and of this one where ranks differ. The last eight bits
// count the calls of one operation.
inline uint32_t tag_of(const fabric::Operation& operation, uint64_t sequence) {
  return static_cast<uint32_t>(sequence & 0x3ff) << 22 | fingerprint(operation) << 8;
}

}  // namespace lockstep::comm::gloo
