// SPDX-License-Identifier: Apache-2.0
#include "lockstep/parallel/flat/stray_writes.h"

#include <algorithm>
#include <cstring>

namespace lockstep::parallel::detail {

uint64_t StrayWrites::value_of(const Sample& sample) {
  uint64_t value = 0;
  std::memcpy(&value, sample.memory + sample.offset, sample.width);
  return value;
}

void StrayWrites::add(const void* memory, size_t begin, size_t count, size_t width) {
  constexpr size_t kSamples = 4;
  const size_t samples = std::min(kSamples, count);
  for (size_t i = 0; i < samples; ++i) {
    const size_t element = samples == 1 ? 0 : i * (count - 1) / (samples - 1);
    samples_.push_back({static_cast<const std::byte*>(memory), begin + element * width,
                        std::min(width, sizeof(uint64_t))});
  }
}

void StrayWrites::watch(bool on) {
  for (Sample& sample : samples_) {
    if (on) sample.value = value_of(sample);
  }
  watches_ = on;
}

std::optional<size_t> StrayWrites::find() const {
  if (!watches_) return std::nullopt;
  for (const Sample& sample : samples_) {
    if (value_of(sample) != sample.value) return sample.offset;
  }
  return std::nullopt;
}

}  // namespace lockstep::parallel::detail
