// SPDX-License-Identifier: Apache-2.0
// Loops over the random words of neighbouring elements on the CPU, for kernels that are built for
// several instruction sets: everything has internal linkage, since they must not share one copy.
// Private: not installed.
#pragma once

#ifdef __AVX2__
#include <immintrin.h>
#endif

#include <algorithm>
#include <cstdint>

#include "lockstep/core/philox.h"

namespace lockstep {
namespace {

// So many blocks side by side hide the latency of Philox's multiplications; more than fit into the
// registers gain nothing.
constexpr int kPhiloxBlocks = 16;
constexpr int kPhiloxGroup = 4 * kPhiloxBlocks;

struct PhiloxGroup {
  uint32_t lane[4][kPhiloxBlocks];
};

// random_words() of neighbouring blocks.
#ifdef __AVX2__
// By hand, which is twice as fast as what gcc 13 makes of the loops below. Each word has a lane of
// 64 bits, so that products fit; what is left in the upper halves does not matter, since the
// multiplication reads the lower ones.
[[gnu::always_inline]] inline PhiloxGroup group_words(const RandomKey& key, uint64_t block) {
  constexpr int kVectors = kPhiloxBlocks / 4;
  __m256i a[kVectors], b[kVectors], c[kVectors], d[kVectors];
  for (int i = 0; i < kVectors; ++i) {
    const auto first = static_cast<int64_t>(block) + 4 * i;
    a[i] = _mm256_add_epi64(_mm256_set1_epi64x(first), _mm256_setr_epi64x(0, 1, 2, 3));
    b[i] = _mm256_srli_epi64(a[i], 32);
    c[i] = _mm256_set1_epi64x(key.step);
    d[i] = _mm256_set1_epi64x(key.micro_batch);
  }
  auto key0 = static_cast<uint32_t>(key.tensor), key1 = static_cast<uint32_t>(key.tensor >> 32);
  const __m256i for_a = _mm256_set1_epi64x(kPhiloxFirst), for_c = _mm256_set1_epi64x(kPhiloxThird);
#pragma GCC unroll 10
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const __m256i keys0 = _mm256_set1_epi64x(key0), keys1 = _mm256_set1_epi64x(key1);
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) {
      const __m256i first = _mm256_mul_epu32(a[i], for_a), third = _mm256_mul_epu32(c[i], for_c);
      a[i] = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(third, 32), b[i]), keys0);
      b[i] = third;
      c[i] = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(first, 32), d[i]), keys1);
      d[i] = first;
    }
    next_philox_key(key0, key1);
  }
  PhiloxGroup group;
  const __m256i lower_halves = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
  for (int i = 0; i < kVectors; ++i) {
    const __m256i words[] = {a[i], b[i], c[i], d[i]};
    for (int l = 0; l < 4; ++l) {
      const __m256i packed = _mm256_permutevar8x32_epi32(words[l], lower_halves);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(group.lane[l] + 4 * i),
                       _mm256_castsi256_si128(packed));
    }
  }
  return group;
}
#else
// The loops turned round, so that the compiler vectorises.
[[gnu::always_inline]] inline PhiloxGroup group_words(const RandomKey& key, uint64_t block) {
  PhiloxGroup group;
  for (int i = 0; i < kPhiloxBlocks; ++i) {
    group.lane[0][i] = static_cast<uint32_t>(block + i);
    group.lane[1][i] = static_cast<uint32_t>((block + i) >> 32);
    group.lane[2][i] = key.step;
    group.lane[3][i] = key.micro_batch;
  }
  auto key0 = static_cast<uint32_t>(key.tensor), key1 = static_cast<uint32_t>(key.tensor >> 32);
#pragma GCC unroll 10
  for (int round = 0; round < kPhiloxRounds; ++round) {
#pragma GCC unroll 1
    for (int i = 0; i < kPhiloxBlocks; ++i) {
      Lanes<uint32_t> counter = {
          {group.lane[0][i], group.lane[1][i], group.lane[2][i], group.lane[3][i]}};
      philox_round(counter, key0, key1);
      for (int l = 0; l < 4; ++l) group.lane[l][i] = counter.lane[l];
    }
    next_philox_key(key0, key1);
  }
  return group;
}
#endif

// out[i] = of(words of the element's block), for whole groups side by side and for blocks alone at
// the ends.
template <class T, class Of>
[[gnu::always_inline]] inline void for_elements(const RandomKey& key, uint64_t index, int64_t count,
                                                T* __restrict out, Of of) {
  while (count > 0) {
    int64_t done = 0;
    if (index % 4 == 0 && count >= kPhiloxGroup) {
      const PhiloxGroup group = group_words(key, index / 4);
      for (int i = 0; i < kPhiloxBlocks; ++i) {
        const Lanes<T> values = of(Lanes<uint32_t>{
            {group.lane[0][i], group.lane[1][i], group.lane[2][i], group.lane[3][i]}});
        for (int l = 0; l < 4; ++l) out[4 * i + l] = values.lane[l];
      }
      done = kPhiloxGroup;
    } else {
      const Lanes<T> values = of(random_words(key, index / 4));
      done = std::min<int64_t>(count, 4 - static_cast<int64_t>(index % 4));
      for (int64_t i = 0; i < done; ++i) out[i] = values.lane[index % 4 + i];
    }
    index += done;
    out += done;
    count -= done;
  }
}

// For for_elements(): the words themselves.
struct SameWords {
  LOCKSTEP_HOST_DEVICE Lanes<uint32_t> operator()(Lanes<uint32_t> words) const { return words; }
};

}  // namespace
}  // namespace lockstep
