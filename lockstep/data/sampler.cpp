// SPDX-License-Identifier: Apache-2.0
#include "lockstep/data/sampler.h"

#include <cmath>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::data {
namespace {

// Four make a permutation that cannot be told from a random one on large tables (Luby and
// Rackoff). How often each order of five samples comes is 16 % uneven after 8 and even after 16.
constexpr uint32_t kRounds = 24;

uint64_t ceiling_root(uint64_t n) {
  auto root = static_cast<uint64_t>(std::sqrt(static_cast<double>(n)));
  while (root * root < n) ++root;
  while (root > 1 && (root - 1) * (root - 1) >= n) --root;
  return root;
}

}  // namespace

int64_t window_count(int64_t tokens, int64_t length) {
  if (length < 1) throw ConfigError(format("a sample of {} tokens, must be at least 1", length));
  return tokens < 2 ? 0 : (tokens - 1) / length;
}

Sampler::Sampler(int64_t samples, uint64_t seed) : samples_(samples) {
  if (samples < 1 || samples > int64_t{1} << 60) {
    throw ConfigError(format("data order of {} samples, must be in [1, 2^60]", samples));
  }
  const auto count = static_cast<uint64_t>(samples);
  rows_ = ceiling_root(count);
  columns_ = (count + rows_ - 1) / rows_;
  key_ = random_key(seed, "data order", "");
}

// A Feistel network: the place of a value in a table, (row, column), is moved along its column by a
// random function of the column, then along its row by one of the row, and so on. Each round can be
// undone, so the whole is a permutation of the table.
uint64_t Sampler::permuted(uint64_t value, uint32_t epoch) const {
  uint64_t row = value / columns_, column = value % columns_;
  for (uint32_t round = 0; round < kRounds; round += 2) {
    row = (row + uniform_below({key_.tensor, epoch, round}, column, rows_)) % rows_;
    column = (column + uniform_below({key_.tensor, epoch, round + 1}, row, columns_)) % columns_;
  }
  return row * columns_ + column;
}

int64_t Sampler::operator()(int64_t index) const {
  const int64_t epoch = index / samples_;
  if (index < 0 || epoch > UINT32_MAX) {
    throw ConfigError(
        format("data order: position {} of {} samples an epoch; it must be at least 0 "
               "and within 2^32 epochs",
               index, samples_));
  }
  // The table has a few places more than there are samples. Who lands there walks on: the walk is
  // along a cycle of the permutation, so it comes back, and two never meet.
  auto value = static_cast<uint64_t>(index % samples_);
  do {
    value = permuted(value, static_cast<uint32_t>(epoch));
  } while (value >= static_cast<uint64_t>(samples_));
  return static_cast<int64_t>(value);
}

}  // namespace lockstep::data
