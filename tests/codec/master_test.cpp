// SPDX-License-Identifier: Apache-2.0
// Float32 masters in codes and remainders.
#include "lockstep/codec/master.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace lockstep::codec {
namespace {

using testing::Each;

std::vector<std::pair<std::string, std::vector<float>>> samples() {
  std::mt19937 random(17);
  std::normal_distribution<float> normal;
  std::vector<float> weights(1000), spread(1000), sparse(1000), denormal(1000);
  for (size_t i = 0; i < 1000; ++i) {
    weights[i] = 0.02f * normal(random);
    spread[i] = std::exp(4 * normal(random)) * normal(random);
    sparse[i] = i % 7 == 0 ? normal(random) : 0;
    denormal[i] = 1e-40f * normal(random);
  }
  return {{"weights", weights}, {"spread", spread}, {"sparse", sparse}, {"denormal", denormal}};
}

struct Coded {
  Coded(Codec codec, size_t count)
      : codes(codes_size(codec, static_cast<int64_t>(count))),
        scales(scales_size(codec, static_cast<int64_t>(count)) / sizeof(float)),
        remainder(count),
        array{codec, codes.data(), scales.empty() ? nullptr : scales.data(), remainder.data()} {}

  std::vector<std::byte> codes;
  std::vector<float> scales;
  std::vector<int8_t> remainder;
  CodedArray array;
};

std::vector<float> joined(const Coded& coded) {
  std::vector<float> values(coded.remainder.size());
  join(coded.array, values.data(), static_cast<int64_t>(values.size()));
  return values;
}

TEST(Master, KeepsMoreThanItsCodes) {
  for (const Codec codec : {Codec::bf16, Codec::int8, Codec::quantization}) {
    for (const auto& [name, values] : samples()) {
      Coded coded(codec, values.size());
      split(values.data(), coded.array, 1000);
      const std::vector<float> master = joined(coded);
      for (size_t i = 0; i < 1000; ++i) {
        const size_t begin = i / kBlock * kBlock;
        const size_t end = std::min<size_t>(begin + kBlock, 1000);
        float largest = 0;
        for (size_t k = begin; k < end; ++k) largest = std::max(largest, std::fabs(values[k]));
        const double bound = codec == Codec::bf16   ? std::fabs(values[i]) * 0x1p-15
                             : codec == Codec::int8 ? 1.01 * largest * kEvenUnit
                                                    : 1.01 * largest * kDynamicUnit;
        ASSERT_NEAR(master[i], values[i], bound + 1e-42) << name << " " << name_of(codec);
      }
      // Joined and split again it is what it was.
      Coded again(codec, master.size());
      split(master.data(), again.array, 1000);
      if (codec == Codec::quantization) {
        for (size_t i = 0; i < 1000; ++i)
          ASSERT_NEAR(joined(again)[i], master[i], 1e-3 * std::fabs(master[i]) + 1e-4);
      } else {
        EXPECT_EQ(coded.codes, again.codes) << name << " " << name_of(codec);
        EXPECT_EQ(coded.remainder, again.remainder) << name << " " << name_of(codec);
      }
    }
  }
}

// Updates that are far below the step of a code add up.
TEST(Master, SmallUpdatesAddUp) {
  for (const Codec codec : {Codec::bf16, Codec::int8, Codec::quantization}) {
    std::vector<float> values(256, 0.5f);
    values[0] = 1;
    Coded coded(codec, values.size());
    split(values.data(), coded.array, 256);
    const float update = 1.f / 4096;
    for (int step = 0; step < 200; ++step) {
      values = joined(coded);
      for (size_t i = 1; i < values.size(); ++i) values[i] += update;
      split(values.data(), coded.array, 256);
    }
    values = joined(coded);
    // Cutting off takes a unit of each step at the most.
    const double bound = codec == Codec::quantization ? 200 * kDynamicUnit : 200 * kEvenUnit;
    for (size_t i = 1; i < values.size(); ++i)
      ASSERT_NEAR(values[i], 0.5 + 200 * update, bound) << name_of(codec);
  }
}

TEST(Master, ValuesThatAreNotFiniteStaySo) {
  for (const Codec codec : {Codec::bf16, Codec::int8, Codec::quantization}) {
    std::vector<float> values(256, 0.5f);
    values[3] = std::numeric_limits<float>::quiet_NaN();
    Coded coded(codec, values.size());
    split(values.data(), coded.array, 256);
    EXPECT_TRUE(std::isnan(joined(coded)[3])) << name_of(codec);
    values.assign(256, 0.f);
    split(values.data(), coded.array, 256);
    EXPECT_THAT(joined(coded), Each(0.f)) << name_of(codec);
  }
}

}  // namespace
}  // namespace lockstep::codec
