// SPDX-License-Identifier: Apache-2.0
#include "lockstep/nn/random/random_kernels.h"

#include <algorithm>
#include <limits>

#include "lockstep/core/philox_groups.h"

#ifndef LOCKSTEP_ISA
#define LOCKSTEP_ISA baseline
#endif

namespace lockstep::nn::LOCKSTEP_ISA {
namespace {

// What becomes of a block's words. Structs, because a lambda this long is not inlined, and what is
// not inlined is not vectorised.
struct Uniform {
  Distribution distribution;
  LOCKSTEP_HOST_DEVICE Lanes<float> operator()(Lanes<uint32_t> words) const {
    return transform(to_uniform(words), distribution);
  }
};
struct Normal {
  Distribution distribution;
  LOCKSTEP_HOST_DEVICE Lanes<float> operator()(Lanes<uint32_t> words) const {
    return transform(to_normal(words), distribution);
  }
};

void draw(const RandomKey& key, uint64_t index, int64_t count, const Distribution& distribution,
          float* out) {
  if (distribution.kind == Distribution::Kind::uniform) {
    for_elements(key, index, count, out, Uniform{distribution});
  } else {
    for_elements(key, index, count, out, Normal{distribution});
  }
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  if (distribution.low > -kInfinity || distribution.high < kInfinity) {
    for (int64_t i = 0; i < count; ++i) out[i] = inside(out[i], key, index + i, distribution);
  }
}

template <class T>
void drop(const RandomKey& key, uint64_t index, int64_t count, const Drop& drop, const T* in,
          T* out) {
  constexpr int64_t kAtOnce = 4 * kPhiloxGroup;
  const auto scale = static_cast<T>(drop.scale);
  const uint32_t threshold = drop.threshold;
  for (int64_t done = 0; done < count; done += kAtOnce) {
    const int64_t n = std::min(kAtOnce, count - done);
    uint32_t words[kAtOnce];
    for_elements(key, index + done, n, words, SameWords{});
#pragma GCC ivdep
    for (int64_t i = done; i < done + n; ++i) {
      const T kept = in[i] * scale;
      out[i] = words[i - done] < threshold ? T{0} : kept;
    }
  }
}

}  // namespace

extern const CpuKernels kKernels = {
    .draw = draw, .drop_float = drop<float>, .drop_double = drop<double>};

}  // namespace lockstep::nn::LOCKSTEP_ISA
