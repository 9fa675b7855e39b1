// SPDX-License-Identifier: Apache-2.0
// Which sample comes next, as a function: no list of a million numbers to shuffle, keep or restore.
#pragma once

#include <cstdint>

#include "lockstep/core/philox.h"

namespace lockstep::data {

// Samples of `length` inputs and as many targets in a stream: sample k is tokens
// [k * length, k * length + length], whose last one is also the first of the next sample.
int64_t window_count(int64_t tokens, int64_t length);

// Every epoch visits each of the samples once, in an order of its own that depends only on the seed
// and the epoch. Constant memory, constant expected time.
class Sampler {
 public:
  // Throws ConfigError where there is no sample.
  Sampler(int64_t samples, uint64_t seed);

  int64_t samples() const { return samples_; }
  // The sample at a position that counts over the whole run, not over an epoch.
  int64_t operator()(int64_t index) const;

 private:
  uint64_t permuted(uint64_t value, uint32_t epoch) const;

  int64_t samples_;
  uint64_t rows_, columns_;  // the smallest square-like table that has a place for each sample
  RandomKey key_;
};

}  // namespace lockstep::data
