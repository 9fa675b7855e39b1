// SPDX-License-Identifier: Apache-2.0
#include "lockstep/core/philox.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <set>
#include <vector>

#include "lockstep/core/error.h"
#include "tests/support/sampling.h"

namespace lockstep {
namespace {

using Words = std::array<uint32_t, 4>;

Words to_array(const Lanes<uint32_t>& lanes) {
  return {lanes.lane[0], lanes.lane[1], lanes.lane[2], lanes.lane[3]};
}

Words bits_of(const Lanes<float>& lanes) {
  Words bits;
  for (size_t i = 0; i < 4; ++i) bits[i] = std::bit_cast<uint32_t>(lanes.lane[i]);
  return bits;
}

// The known answers that the authors publish with Philox.
TEST(Philox, KnownAnswers) {
  EXPECT_EQ(to_array(philox({{0, 0, 0, 0}}, 0, 0)),
            (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(to_array(philox({{~0u, ~0u, ~0u, ~0u}}, ~0u, ~0u)),
            (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(
      to_array(philox({{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}}, 0xa4093822, 0x299f31d0)),
      (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

// What follows must never change: models are reproduced by it. The values were computed apart from
// this code, with exact fractions, from the definition in docs/random.md.
TEST(RandomKey, IsFrozen) {
  EXPECT_EQ(random_key(0, "", "").tensor, 0xb638c456c1ad0f66u);
  EXPECT_EQ(random_key(0, "init", "weight").tensor, 0x9dce962969f60daau);
  EXPECT_EQ(random_key(1, "init", "weight").tensor, 0x1cb7d1bd3935b964u);
  EXPECT_EQ(random_key(0, "dropout", "weight").tensor, 0xf10e8347fe198b2cu);
  EXPECT_EQ(random_key(0, "init", "weights").tensor, 0xfb35ab5f7a5ca299u);
  EXPECT_EQ(random_key(1234567890123456789, "init", "blocks.3.attention.wq.weight").tensor,
            0xfcfd95a0cc1dc265u);
}

struct Frozen {
  RunPosition position;
  uint64_t block;
  Words words, normals;
};
const Frozen kFrozen[] = {
    {{0, 0},
     0,
     {0x6bf5014f, 0xda34de85, 0x05e12a80, 0x6d9b45db},
     {0x3f49c489, 0xbf86984a, 0xc01e35b3, 0x3f99696c}},
    {{7, 3},
     1,
     {0x01bd4ddd, 0xf268ce0f, 0x8b2b1051, 0xd5d97413},
     {0x403f11e0, 0xbf846a71, 0x3f10693f, 0xbf72f796}},
    {{0xffffffff, 0xffffffff},
     uint64_t{1} << 61,
     {0x6782911a, 0xa381b720, 0x86f413cd, 0xafe3c613},
     {0xbf5dc348, 0xbf83d26d, 0xbedf2a1e, 0xbf85aade}},
    {{0, 0},
     12345678901,
     {0x734a7332, 0x711ab4a8, 0x44e1081a, 0xc7a35eca},
     {0xbf96fe1c, 0x3ee733d1, 0x3e9a9f2c, 0xbfcbc682}},
};

TEST(RandomKey, ItsNumbersAreFrozen) {
  for (const auto& frozen : kFrozen) {
    const auto key = random_key(42, "init", "wte.weight", frozen.position);
    const auto words = random_words(key, frozen.block);
    EXPECT_EQ(to_array(words), frozen.words);
    EXPECT_EQ(bits_of(to_normal(words)), frozen.normals);
    for (size_t i = 0; i < 4; ++i) {
      const uint64_t index = 4 * frozen.block + i;
      EXPECT_EQ(random_word(key, index), frozen.words[i]);
      EXPECT_EQ(std::bit_cast<uint32_t>(normal(key, index)), frozen.normals[i]);
      EXPECT_EQ(uniform(key, index), std::ldexp(static_cast<double>(frozen.words[i] >> 8), -24));
    }
  }
}

TEST(RandomKey, DiffersInEveryPart) {
  std::set<std::array<uint64_t, 3>> keys;
  int made = 0;
  for (const uint64_t seed : {0, 1, 2}) {
    for (const auto* purpose : {"init", "dropout"}) {
      for (const auto* name : {"", "a", "b", "ab", "ba"}) {
        for (const RunPosition position : {RunPosition{0, 0}, {1, 0}, {0, 1}}) {
          const auto key = random_key(seed, purpose, name, position);
          keys.insert({key.tensor, key.step, key.micro_batch});
          ++made;
        }
      }
    }
  }
  EXPECT_EQ(static_cast<int>(keys.size()), made);
  EXPECT_NE(random_key(0, "a", "bc"), random_key(0, "ab", "c"));
}

TEST(RandomKey, RefusesPositionsThatDoNotFit) {
  EXPECT_THROW(random_key(0, "init", "w", {.step = -1}), ConfigError);
  EXPECT_THROW(random_key(0, "init", "w", {.micro_batch = int64_t{1} << 32}), ConfigError);
  try {
    random_key(0, "init", "w", {.step = -5});
  } catch (const ConfigError& error) {
    EXPECT_STREQ(error.what(), "[random_key] the step is -5, must be in [0, 2^32)");
  }
}

TEST(Uniform, CoversItsEnds) {
  EXPECT_EQ(to_uniform(0u), 0.0f);
  EXPECT_EQ(to_uniform(~0u), std::nextafter(1.0f, 0.0f));
}

TEST(UniformBelow, IsTheUpperHalfOfTheProduct) {
  const auto key = random_key(3, "test", "integers");
  for (const uint64_t n : {uint64_t{1}, uint64_t{2}, uint64_t{10}, uint64_t{1} << 32,
                           uint64_t{0x123456789abcdef}, ~uint64_t{0}}) {
    for (uint64_t i = 0; i < 1000; ++i) {
      const auto words = to_array(random_words(key, i / 2));
      const auto bits = uint64_t{words[i % 2 * 2 + 1]} << 32 | words[i % 2 * 2];
      __extension__ using Wide = unsigned __int128;
      ASSERT_EQ(uniform_below(key, i, n), static_cast<uint64_t>((Wide{bits} * n) >> 64));
    }
  }
  std::array<int, 6> counts{};
  for (uint64_t i = 0; i < 600'000; ++i) ++counts[uniform_below(key, i, 6)];
  for (const int count : counts) EXPECT_NEAR(count, 100'000, 5 * std::sqrt(100'000 * 5 / 6.0));
}

// ---- distributions: five standard errors, with fixed keys, so nothing here can come and go ----

const uint64_t kDraws = test::tests_all() ? 4'000'000 : 1'000'000;

double normal_below(double x) { return 0.5 * std::erfc(-x / std::sqrt(2.0)); }

// Sorts. Kolmogorov and Smirnov's distance times sqrt(n): above 1.95 once in a thousand.
template <class Below>
double distance(std::vector<float>& values, Below below) {
  std::sort(values.begin(), values.end());
  const auto n = static_cast<double>(values.size());
  double largest = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    const double expected = below(values[i]), rank = static_cast<double>(i);
    largest = std::max({largest, expected - rank / n, (rank + 1) / n - expected});
  }
  return largest * std::sqrt(n);
}

TEST(Normal, HasTheMomentsTailsAndShapeOfTheDistribution) {
  const auto key = random_key(1, "test", "normal");
  std::vector<float> values;
  double sum[5] = {};
  std::array<int64_t, 6> above{}, below{};
  for (uint64_t block = 0; block < kDraws / 4; ++block) {
    for (const float z : to_normal(random_words(key, block)).lane) {
      values.push_back(z);
      double power = 1;
      for (int k = 1; k <= 4; ++k) sum[k] += power *= z;
      for (size_t k = 1; k < above.size(); ++k) {
        above[k] += z > static_cast<float>(k);
        below[k] += z < -static_cast<float>(k);
      }
    }
  }
  const double n = kDraws, error = 5 / std::sqrt(n);
  EXPECT_NEAR(sum[1] / n, 0, error);
  EXPECT_NEAR(sum[2] / n, 1, error * std::sqrt(2.0));
  EXPECT_NEAR(sum[3] / n, 0, error * std::sqrt(15.0));
  EXPECT_NEAR(sum[4] / n, 3, error * std::sqrt(96.0));
  for (size_t k = 1; k < above.size(); ++k) {
    const double expected = n * normal_below(-static_cast<double>(k));
    EXPECT_NEAR(above[k], expected, 5 * std::sqrt(expected)) << k;
    EXPECT_NEAR(below[k], expected, 5 * std::sqrt(expected)) << k;
  }
  EXPECT_LT(distance(values, normal_below), 1.95);
}

TEST(Uniform, HasTheMomentsAndShapeOfTheDistribution) {
  const auto key = random_key(1, "test", "uniform");
  std::vector<float> values;
  double sum = 0, squares = 0;
  for (uint64_t i = 0; i < kDraws; ++i) {
    const double u = uniform(key, i);
    values.push_back(static_cast<float>(u));
    sum += u;
    squares += u * u;
  }
  const double n = kDraws, error = 5 / std::sqrt(n);
  EXPECT_NEAR(sum / n, 1.0 / 2, error * std::sqrt(1.0 / 12));
  EXPECT_NEAR(squares / n, 1.0 / 3, error * std::sqrt(4.0 / 45));
  EXPECT_LT(distance(values, [](double x) { return x; }), 1.95);
}

// Products of neighbours average to nothing: lanes of a block, blocks, steps, micro-batches, names.
TEST(Normal, NeighboursDoNotCorrelate) {
  constexpr uint64_t kPairs = 400'000;
  const auto key = random_key(1, "test", "pairs", {4, 2});
  const RandomKey others[] = {
      random_key(1, "test", "pairs", {5, 2}), random_key(1, "test", "pairs", {4, 3}),
      random_key(2, "test", "pairs", {4, 2}), random_key(1, "test", "pairt", {4, 2})};
  const double limit = 5 / std::sqrt(static_cast<double>(kPairs));
  for (const uint64_t lag : {1, 2, 3, 4, 8, 1024}) {
    double sum = 0;
    for (uint64_t i = 0; i < kPairs; ++i) sum += normal(key, i) * normal(key, i + lag);
    EXPECT_NEAR(sum / kPairs, 0, limit) << "lag " << lag;
  }
  for (const auto& other : others) {
    double sum = 0;
    for (uint64_t i = 0; i < kPairs; ++i) sum += normal(key, i) * normal(other, i);
    EXPECT_NEAR(sum / kPairs, 0, limit);
  }
}

// The transform follows its formula, up to float32: the radius is that of 31 bits, the angle of 32.
TEST(Normal, IsBoxAndMullersFormula) {
  const auto key = random_key(9, "test", "formula");
  double largest = 0;
  for (uint64_t block = 0; block < 100'000; ++block) {
    const auto words = random_words(key, block);
    const auto values = to_normal(words);
    for (int i = 0; i < 4; i += 2) {
      const double u = (words.lane[i] / 2 + 0.5) * 0x1p-31;
      const double radius = std::sqrt(-2 * std::log(u)),
                   angle = 2 * M_PI * words.lane[i + 1] * 0x1p-32;
      // Where u is near 1 its own rounding to 24 bits is all of the error; the radius is tiny
      // there.
      const double rounding = radius > 0.1 ? 0 : 1e-4;
      largest = std::max({largest, std::abs(values.lane[i] - radius * std::cos(angle)) - rounding,
                          std::abs(values.lane[i + 1] - radius * std::sin(angle)) - rounding});
    }
  }
  EXPECT_LT(largest, 2e-6);
}

}  // namespace
}  // namespace lockstep
