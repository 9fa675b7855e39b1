// SPDX-License-Identifier: Apache-2.0
#include "lockstep/parallel/flat/seal.h"

#include <algorithm>
#include <cstring>

namespace lockstep::parallel::detail {
namespace {

uint64_t value_at(const void* memory, size_t offset, size_t width) {
  uint64_t value = 0;
  std::memcpy(&value, static_cast<const std::byte*>(memory) + offset, width);
  return value;
}

}  // namespace

void Seal::watch(size_t begin, size_t count, size_t width) {
  constexpr size_t kSamples = 4;
  const size_t samples = std::min(kSamples, count);
  for (size_t i = 0; i < samples; ++i) {
    const size_t element = samples == 1 ? 0 : i * (count - 1) / (samples - 1);
    samples_.push_back({begin + element * width, std::min(width, sizeof(uint64_t))});
  }
}

void Seal::close(const void* memory) {
  for (Sample& sample : samples_) sample.value = value_at(memory, sample.offset, sample.width);
  closed_ = true;
}

std::optional<size_t> Seal::broken_at(const void* memory) const {
  if (!closed_) return std::nullopt;
  for (const Sample& sample : samples_) {
    if (value_at(memory, sample.offset, sample.width) != sample.value) return sample.offset;
  }
  return std::nullopt;
}

}  // namespace lockstep::parallel::detail
