// SPDX-License-Identifier: Apache-2.0
#include "lockstep/core/philox.h"

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep {
namespace {

// One step of SplitMix64: every bit of the result depends on every bit of x, and none is lost.
uint64_t mix(uint64_t x) {
  x += 0x9E3779B97F4A7C15;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

// FNV-1a.
uint64_t hash_of(std::string_view text) {
  uint64_t hash = 0xCBF29CE484222325;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001B3;
  return hash;
}

uint32_t checked(int64_t value, const char* what) {
  if (value < 0 || value > UINT32_MAX) {
    throw ConfigError(format("[random_key] {} is {}, must be in [0, 2^32)", what, value));
  }
  return static_cast<uint32_t>(value);
}

}  // namespace

RandomKey random_key(uint64_t seed, std::string_view purpose, std::string_view name,
                     RunPosition position) {
  return {.tensor = mix(mix(mix(seed) ^ hash_of(purpose)) ^ hash_of(name)),
          .step = checked(position.step, "the step"),
          .micro_batch = checked(position.micro_batch, "the micro-batch")};
}

}  // namespace lockstep
