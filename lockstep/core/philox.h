// SPDX-License-Identifier: Apache-2.0
// Random numbers as functions: the value of element i of a tensor depends on a key and on i, and on
// nothing that was drawn before. Every function here gives the same bits on a CPU and on a GPU,
// with any compiler flags short of -ffast-math; docs/random.md has the definition. For C++ and
// CUDA.
#pragma once

#include <cstdint>
#include <string_view>

#ifdef __CUDACC__
#define LOCKSTEP_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define LOCKSTEP_HOST_DEVICE [[gnu::always_inline]] inline
#endif

namespace lockstep {

// Whose numbers, and when. Keys that differ in step or micro-batch never give the same Philox
// input; those that differ in seed, purpose or name do with the chance of a 64-bit hash.
struct RandomKey {
  uint64_t tensor = 0;  // hash of seed, purpose and name
  uint32_t step = 0;
  uint32_t micro_batch = 0;

  bool operator==(const RandomKey&) const = default;
};

// Where in a run: the optimizer step and, within it, the micro-batch, counted over all
// data-parallel ranks.
struct RunPosition {
  int64_t step = 0;
  int64_t micro_batch = 0;
};

// `purpose` keeps uses of one name apart: "init", "dropout". Throws ConfigError where the position
// is outside [0, 2^32).
RandomKey random_key(uint64_t seed, std::string_view purpose, std::string_view name,
                     RunPosition position = {});

// Values of four neighbouring elements.
template <class T>
struct Lanes {
  T lane[4];
};

// Philox4x32-10 (Salmon et al., SC 2011), in its parts for loops that vectorise, and whole.
inline constexpr int kPhiloxRounds = 10;
inline constexpr uint32_t kPhiloxFirst = 0xD2511F53, kPhiloxThird = 0xCD9E8D57;

LOCKSTEP_HOST_DEVICE void philox_round(Lanes<uint32_t>& counter, uint32_t key0, uint32_t key1) {
  const uint64_t first = uint64_t{kPhiloxFirst} * counter.lane[0];
  const uint64_t third = uint64_t{kPhiloxThird} * counter.lane[2];
  counter = {
      {static_cast<uint32_t>(third >> 32) ^ counter.lane[1] ^ key0, static_cast<uint32_t>(third),
       static_cast<uint32_t>(first >> 32) ^ counter.lane[3] ^ key1, static_cast<uint32_t>(first)}};
}

LOCKSTEP_HOST_DEVICE void next_philox_key(uint32_t& key0, uint32_t& key1) {
  key0 += 0x9E3779B9;
  key1 += 0xBB67AE85;
}

LOCKSTEP_HOST_DEVICE Lanes<uint32_t> philox(Lanes<uint32_t> counter, uint32_t key0, uint32_t key1) {
  for (int round = 0; round < kPhiloxRounds; ++round) {
    philox_round(counter, key0, key1);
    next_philox_key(key0, key1);
  }
  return counter;
}

// 32 random bits for each of the elements 4 * block ... 4 * block + 3.
LOCKSTEP_HOST_DEVICE Lanes<uint32_t> random_words(RandomKey key, uint64_t block) {
  return philox({{static_cast<uint32_t>(block), static_cast<uint32_t>(block >> 32), key.step,
                  key.micro_batch}},
                static_cast<uint32_t>(key.tensor), static_cast<uint32_t>(key.tensor >> 32));
}

LOCKSTEP_HOST_DEVICE uint32_t random_word(RandomKey key, uint64_t index) {
  return random_words(key, index / 4).lane[index % 4];
}

// ---- from bits to numbers ----

// a * b + c, rounded once. A compiler may fuse a * b + c or not; called so, it has no choice.
LOCKSTEP_HOST_DEVICE float fused(float a, float b, float c) {
#ifdef __CUDA_ARCH__
  return __fmaf_rn(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}

namespace detail {

LOCKSTEP_HOST_DEVICE float square_root(float x) {
#ifdef __CUDA_ARCH__
  return __fsqrt_rn(x);
#else
  return __builtin_sqrtf(x);
#endif
}

LOCKSTEP_HOST_DEVICE float from_bits(uint32_t bits) { return __builtin_bit_cast(float, bits); }
LOCKSTEP_HOST_DEVICE uint32_t to_bits(float x) { return __builtin_bit_cast(uint32_t, x); }

// -2 log(u) for u in [2^-32, 1], to a relative 2e-7. u is 2^e (1 + f) with 1 + f in [sqrt(1/2),
// sqrt(2)); the polynomial is the minimax one of -2 log(1 + f) / f.
LOCKSTEP_HOST_DEVICE float minus_two_log(float u) {
  const uint32_t bits = to_bits(u);
  const int32_t exponent = static_cast<int32_t>(bits - 0x3f3504f3) >> 23;
  const float f = from_bits(bits - (static_cast<uint32_t>(exponent) << 23)) - 1.0f;
  float poly = -0.174447115f;
  poly = fused(poly, f, 0.287336854f);
  poly = fused(poly, f, -0.299045331f);
  poly = fused(poly, f, 0.331247863f);
  poly = fused(poly, f, -0.399136672f);
  poly = fused(poly, f, 0.500041481f);
  poly = fused(poly, f, -0.666683712f);
  poly = fused(poly, f, 0.999999759f);
  poly = fused(poly, f, -1.99999995f);
  return fused(static_cast<float>(exponent), -1.38629436f, poly * f);
}

struct Point {
  float x, y;
};

// Cosine and sine of word / 2^32 of a turn. The two highest bits, after rounding, are the quarter;
// the rest is s in [-1, 1), in eighths of a turn.
LOCKSTEP_HOST_DEVICE Point on_circle(uint32_t word) {
  const uint32_t quarter = (word + 0x20000000u) >> 30;
  const float s = static_cast<float>(static_cast<int32_t>(word - (quarter << 30))) * 0x1p-29f;
  const float t = s * s;
  float sine = -3.59504523e-5f;
  sine = fused(sine, t, 0.00249000102f);
  sine = fused(sine, t, -0.0807454325f);
  sine = fused(sine, t, 0.785398161f);
  sine *= s;
  float cosine = -3.18727841e-4f;
  cosine = fused(cosine, t, 0.0158496842f);
  cosine = fused(cosine, t, -0.308424166f);
  cosine = fused(cosine, t, 0.999999967f);
  // In odd quarters the two change places. With bits, not a choice: choices become branches, and
  // loops with branches are not vectorised.
  const uint32_t exchange = (to_bits(sine) ^ to_bits(cosine)) & (0u - (quarter & 1));
  const uint32_t x = to_bits(cosine) ^ exchange ^ (((quarter + 1) & 2) << 30);
  const uint32_t y = to_bits(sine) ^ exchange ^ ((quarter & 2) << 30);
  return {from_bits(x), from_bits(y)};
}

// Box and Muller: two words, two independent normal numbers.
LOCKSTEP_HOST_DEVICE Point normal_pair(uint32_t for_radius, uint32_t for_angle) {
  const float u =
      fused(static_cast<float>(static_cast<int32_t>(for_radius >> 1)), 0x1p-31f, 0x1p-32f);
  const float radius = square_root(minus_two_log(u));
  const Point point = on_circle(for_angle);
  return {radius * point.x, radius * point.y};
}

}  // namespace detail

// k / 2^24, k in [0, 2^24): never 1.
LOCKSTEP_HOST_DEVICE float to_uniform(uint32_t word) {
  return static_cast<float>(static_cast<int32_t>(word >> 8)) * 0x1p-24f;
}

LOCKSTEP_HOST_DEVICE Lanes<float> to_uniform(Lanes<uint32_t> words) {
  return {{to_uniform(words.lane[0]), to_uniform(words.lane[1]), to_uniform(words.lane[2]),
           to_uniform(words.lane[3])}};
}

// Mean 0, deviation 1, at most 6.66 in size.
LOCKSTEP_HOST_DEVICE Lanes<float> to_normal(Lanes<uint32_t> words) {
  const auto first = detail::normal_pair(words.lane[0], words.lane[1]);
  const auto second = detail::normal_pair(words.lane[2], words.lane[3]);
  return {{first.x, first.y, second.x, second.y}};
}

LOCKSTEP_HOST_DEVICE float uniform(RandomKey key, uint64_t index) {
  return to_uniform(random_word(key, index));
}

LOCKSTEP_HOST_DEVICE float normal(RandomKey key, uint64_t index) {
  return to_normal(random_words(key, index / 4)).lane[index % 4];
}

// An integer in [0, n), from 64 bits: two lanes of block index / 2. No value is likelier than
// another by more than n / 2^64 of itself.
LOCKSTEP_HOST_DEVICE uint64_t uniform_below(RandomKey key, uint64_t index, uint64_t n) {
  const auto words = random_words(key, index / 2);
  const uint64_t low = words.lane[index % 2 * 2], high = words.lane[index % 2 * 2 + 1];
  // The upper half of (high * 2^32 + low) * n.
  const uint64_t n_low = static_cast<uint32_t>(n), n_high = n >> 32;
  const uint64_t middle = high * n_low + (low * n_low >> 32);
  const uint64_t middle_low = static_cast<uint32_t>(middle) + low * n_high;
  return high * n_high + (middle >> 32) + (middle_low >> 32);
}

}  // namespace lockstep
