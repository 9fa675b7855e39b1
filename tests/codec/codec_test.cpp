// SPDX-License-Identifier: Apache-2.0
// What each codec keeps of a value, against bounds that follow from its definition.
#include "lockstep/codec/codec.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>

#include "lockstep/codec/dynamic_map.h"
#include "lockstep/codec/kernels.h"
#include "lockstep/core/error.h"
#include "tests/support/says.h"

namespace lockstep::codec {
namespace {

using test::says;
using testing::Each;
using testing::ThrowsMessage;

constexpr Codec kFixed[] = {Codec::none, Codec::fp16, Codec::bf16, Codec::int8,
                            Codec::quantization};
constexpr Sign kSigns[] = {Sign::any, Sign::non_negative};
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

std::vector<std::byte> encoded(Codec codec, Sign sign, const std::vector<float>& values) {
  const auto size = static_cast<int64_t>(values.size());
  std::vector<std::byte> bytes(encoded_size(codec, size));
  encode(codec, sign, values.data(), bytes.data(), {size, 0, size});
  return bytes;
}

std::vector<float> decoded(Codec codec, Sign sign, const std::vector<std::byte>& bytes,
                           size_t count) {
  const auto size = static_cast<int64_t>(count);
  std::vector<float> values(count, -7);
  decode(codec, sign, bytes.data(), values.data(), {size, 0, size});
  return values;
}

std::vector<float> through(Codec codec, Sign sign, const std::vector<float>& values) {
  return decoded(codec, sign, encoded(codec, sign, values), values.size());
}

struct Sample {
  std::string name;
  std::vector<float> values;
};

// Values of many sizes and kinds. Those without a sign are the magnitudes of the others.
std::vector<Sample> samples(Sign sign, size_t count) {
  std::mt19937 random(17);
  std::normal_distribution<float> normal;
  std::uniform_int_distribution<uint32_t> bits;
  const auto draw = [&](const auto& next) {
    std::vector<float> values(count);
    for (float& value : values) {
      value = next();
      if (sign == Sign::non_negative) value = std::fabs(value);
    }
    return values;
  };
  return {{"normal", draw([&] { return normal(random); })},
          {"lognormal",
           draw([&] { return std::copysign(std::exp(4 * normal(random)), normal(random)); })},
          {"tiny", draw([&] { return 1e-30f * normal(random); })},
          {"squares", draw([&] { return std::pow(1e-8f * normal(random), 2.f); })},
          {"denormal", draw([&] { return std::bit_cast<float>(bits(random) & 0x8000ffffu); })},
          {"huge", draw([&] { return 3e38f * std::tanh(normal(random)); })},
          {"one", draw([&] { return normal(random) > 2 ? -1.f : 0.f; })},
          {"zeros", draw([] { return -0.f; })}};
}

constexpr size_t kSizes[] = {1, 2, 3, 255, 256, 257, 1000, 4096 + 77};

// Calls body(value, kept, largest magnitude in the value's block, what it is).
template <class Body>
void for_each_value(Codec codec, Sign sign, const Body& body) {
  for (const size_t count : kSizes) {
    for (const auto& [name, values] : samples(sign, count)) {
      const std::vector<float> kept = through(codec, sign, values);
      for (size_t block = 0; block < count; block += kBlock) {
        const size_t end = std::min(count, block + kBlock);
        float largest = 0;
        for (size_t i = block; i < end; ++i) largest = std::max(largest, std::fabs(values[i]));
        for (size_t i = block; i < end; ++i) {
          body(values[i], kept[i], largest, name + " " + std::to_string(i));
        }
      }
    }
  }
}

TEST(Codec, Names) {
  for (const Codec codec :
       {Codec::none, Codec::fp16, Codec::bf16, Codec::int8, Codec::quantization, Codec::lossless}) {
    EXPECT_EQ(parse_codec(name_of(codec)), codec);
  }
  EXPECT_THAT(
      [] { parse_codec("zip"); },
      ThrowsMessage<ConfigError>(says("'zip' ... none, fp16, bf16, int8, quantization, lossless")));
  EXPECT_FALSE(is_lossy(Codec::none));
  EXPECT_FALSE(is_lossy(Codec::lossless));
  EXPECT_TRUE(is_lossy(Codec::quantization));
}

TEST(Codec, Sizes) {
  EXPECT_EQ(encoded_size(Codec::none, 3), 12u);
  EXPECT_EQ(encoded_size(Codec::bf16, 3), 8u);
  EXPECT_EQ(encoded_size(Codec::fp16, 0), 0u);
  EXPECT_EQ(encoded_size(Codec::int8, 0), 0u);
  EXPECT_EQ(encoded_size(Codec::int8, 256), 260u);
  EXPECT_EQ(encoded_size(Codec::quantization, 257), 260u + 8u);
  EXPECT_THROW(encoded_size(Codec::lossless, 4), std::logic_error);
}

TEST(Codec, NoneKeepsEveryBit) {
  const std::vector<float> values{1.5f, -0.f, kNan, -kInf, 1e-45f};
  const auto kept = through(Codec::none, Sign::any, values);
  EXPECT_EQ(std::memcmp(kept.data(), values.data(), values.size() * 4), 0);
}

// Half a unit in the last of `bits` bits; below the normal numbers, of the smallest.
double half_a_unit(float value, int bits, int smallest) {
  return value == 0 ? 0 : std::ldexp(1, std::max(std::ilogb(value) - bits, smallest - 1));
}

TEST(Codec, SixteenBitsRoundToNearest) {
  for (const Sign sign : kSigns) {
    for_each_value(Codec::bf16, sign, [](float value, float kept, float, const std::string& what) {
      if (std::fabs(value) > 3.389e38f) return;  // beyond the largest
      ASSERT_LE(std::fabs(double{kept} - value), half_a_unit(value, 8, -133)) << what;
    });
    for_each_value(Codec::fp16, sign, [](float value, float kept, float, const std::string& what) {
      if (std::fabs(value) >= 65520) {
        ASSERT_EQ(kept, std::copysign(kInf, value)) << what;
      } else {
        ASSERT_LE(std::fabs(double{kept} - value), half_a_unit(value, 11, -24)) << what;
      }
    });
  }
  // Ties go to the even neighbour.
  const std::vector<float> ties{1 + 0x1p-8f, 1 + 3 * 0x1p-8f, -(1 + 0x1p-8f)};
  EXPECT_THAT(through(Codec::bf16, Sign::any, ties), testing::ElementsAre(1, 1 + 0x1p-6f, -1));
  EXPECT_THAT(through(Codec::fp16, Sign::any, {1 + 0x1p-11f, 1 + 3 * 0x1p-11f}),
              testing::ElementsAre(1, 1 + 0x1p-9f));
}

TEST(Codec, Int8IsWithinHalfAStep) {
  for (const Sign sign : kSigns) {
    const double steps = sign == Sign::any ? 254 : 510;
    for_each_value(Codec::int8, sign,
                   [&](float value, float kept, float largest, const std::string& what) {
                     // Roundings of the quotient and the product, and of a result below the normals
                     const double bound = double{largest} * (1 / steps + 0x1p-23) + 0x1p-150;
                     ASSERT_LE(std::fabs(double{kept} - value), bound) << what;
                     ASSERT_TRUE(std::fabs(value) != largest || kept == value) << what;
                   });
  }
}

// The 256 values that quantization's codes stand for, ascending.
std::vector<float> dynamic_map(Sign sign) {
  const auto map = make_dynamic_map(sign == Sign::any);
  return {std::begin(map.values), std::end(map.values)};
}

// No value of the map, times the scale, is nearer than the one that was kept.
TEST(Codec, QuantizationKeepsTheNearestValue) {
  for (const Sign sign : kSigns) {
    const auto map = dynamic_map(sign);
    for_each_value(Codec::quantization, sign,
                   [&](float value, float kept, float largest, const std::string& what) {
                     if (largest == 0) {
                       ASSERT_EQ(kept, 0) << what;
                       return;
                     }
                     // Of either sign, because the scale takes that of the largest.
                     const double ratio = double{value} / largest,
                                  kept_ratio = double{kept} / largest;
                     double nearest = 2, nearest_mirrored = 2;
                     for (const float entry : map) {
                       nearest = std::min(nearest, std::fabs(entry - ratio));
                       nearest_mirrored = std::min(nearest_mirrored, std::fabs(-entry - ratio));
                     }
                     if (sign == Sign::any) nearest = std::max(nearest, nearest_mirrored);
                     const double roundings = 0x1p-23 * std::fabs(ratio) + 0x1p-150 / largest;
                     ASSERT_LE(std::fabs(kept_ratio - ratio), nearest + roundings) << what;
                     ASSERT_GE(double{value} * kept, 0) << what << ": the sign is another";
                   });
  }
}

// The bound that users are told: half of the widest gap, in each power of ten below the largest.
TEST(Codec, QuantizationErrorByMagnitude) {
  for (const Sign sign : kSigns) {
    const auto map = dynamic_map(sign);
    const auto zero = std::find(map.begin(), map.end(), 0.f);
    for_each_value(Codec::quantization, sign,
                   [&](float value, float kept, float largest, const std::string& what) {
                     if (largest < 0x1p-100f)
                       return;  // below the normal numbers there are other roundings
                     const float ratio = std::min(std::fabs(value) / largest, 1.f);
                     // The two values around; for those between the last negative value and -1
                     // there is one.
                     const auto above = std::lower_bound(zero + 1, map.end(), ratio);
                     double gap = *above - *(above - 1);
                     if (sign == Sign::any && above == map.end() - 1) gap *= 2;
                     ASSERT_LE(std::fabs(double{kept} - value), largest * (gap / 2 + 1e-7)) << what;
                   });
  }
}

TEST(Codec, DynamicMaps) {
  for (const Sign sign : kSigns) {
    const auto map = dynamic_map(sign);
    EXPECT_TRUE(std::is_sorted(map.begin(), map.end(), std::less_equal<>())) << "two are the same";
    EXPECT_EQ(map.back(), 1);
    EXPECT_EQ(std::count(map.begin(), map.end(), 0.f), 1);
  }
  const auto any = dynamic_map(Sign::any);
  EXPECT_EQ(any[127], 0);
  EXPECT_FLOAT_EQ(any[0], -0.99296875f);
  EXPECT_FLOAT_EQ(any[254], 0.99296875f);
  EXPECT_FLOAT_EQ(any[128], 0.55e-6f);
  EXPECT_FLOAT_EQ(any[129], 3.25e-6f);
  for (size_t k = 1; k < 128; ++k) EXPECT_EQ(any[127 - k], -any[127 + k]);
  // 64 of them between 0.1 and 1, and half as many in each power of ten below.
  for (int i = 0; i < 7; ++i) {
    const double top = std::pow(10.0, i - 6);
    EXPECT_EQ(std::count_if(any.begin(), any.end() - 1,
                            [&](float value) { return value > top / 10 && value < top; }),
              1 << i);
  }
  const auto rest = dynamic_map(Sign::non_negative);
  EXPECT_EQ(rest[0], 0);
  EXPECT_FLOAT_EQ(rest[1], 0.325e-6f);
  EXPECT_FLOAT_EQ(rest[2], 0.775e-6f);
  EXPECT_FLOAT_EQ(rest[254], 1 - 0.45f / 128);
}

// Every float between two neighbours of the map goes to one of the two, and the border is where it
// has to be: the table of the search against a plain statement of it.
TEST(Codec, QuantizationSearchIsExactAtTheBorders) {
  for (const Sign sign : kSigns) {
    const auto map = dynamic_map(sign);
    std::vector<float> values, expected;
    const auto add = [&](float value, float nearest) {
      if (values.size() % kBlock == 0) {  // so that every block has the scale 1
        values.push_back(1);
        expected.push_back(1);
      }
      values.push_back(value);
      expected.push_back(nearest);
    };
    for (size_t k = 0; k + 1 < map.size(); ++k) {
      const double middle = (double{map[k]} + map[k + 1]) / 2;
      float value = static_cast<float>(middle);
      for (int i = 0; i < 3; ++i) value = std::nextafter(value, -kInf);
      for (int i = 0; i < 7; ++i, value = std::nextafter(value, kInf)) {
        const bool tie = value == middle;
        const float smaller = std::fabs(map[k]) < std::fabs(map[k + 1]) ? map[k] : map[k + 1];
        add(value, tie ? smaller : value < middle ? map[k] : map[k + 1]);
      }
      add(map[k], map[k]);
    }
    EXPECT_EQ(through(Codec::quantization, sign, values), expected);
  }
}

TEST(Codec, QuantizationNeverChangesASign) {
  std::vector<float> values{1};
  for (float value = 1e-12f; value < 1; value *= 1.1f) {
    if (values.size() == kBlock) break;
    values.push_back(-value);
  }
  const auto kept = through(Codec::quantization, Sign::any, values);
  for (size_t i = 1; i < kept.size(); ++i) EXPECT_LE(kept[i], 0);
}

// What was decoded is encoded as it was: saving state and loading it changes nothing.
TEST(Codec, DecodedValuesStayAsTheyAre) {
  for (const Codec codec : kFixed) {
    for (const Sign sign : kSigns) {
      for (const auto& [name, values] : samples(sign, 4096 + 77)) {
        const auto once = through(codec, sign, values);
        EXPECT_EQ(through(codec, sign, once), once) << name_of(codec) << " " << name;
      }
    }
  }
}

TEST(Codec, WhatIsNotFiniteStaysSo) {
  for (const Sign sign : kSigns) {
    for (const float wrong : {kInf, kNan}) {
      for (const size_t at : {0, 255, 256, 599}) {
        std::vector<float> values(600, 0.5f);
        values[at] = wrong;
        for (const Codec codec : {Codec::fp16, Codec::bf16}) {
          const auto kept = through(codec, sign, values);
          for (size_t i = 0; i < kept.size(); ++i) {
            if (i != at) {
              EXPECT_EQ(kept[i], 0.5f);
            } else {
              EXPECT_TRUE(std::isnan(wrong) ? std::isnan(kept[i]) : kept[i] == wrong);
            }
          }
        }
        for (const Codec codec : {Codec::int8, Codec::quantization}) {
          const auto kept = through(codec, sign, values);
          for (size_t i = 0; i < kept.size(); ++i) {
            EXPECT_EQ(std::isnan(kept[i]), i / kBlock == at / kBlock) << i << " " << at;
          }
        }
      }
    }
  }
}

TEST(Codec, PartsAreEqualToTheWhole) {
  for (const Codec codec : kFixed) {
    for (const Sign sign : kSigns) {
      for (const size_t count : {size_t{1}, size_t{256}, size_t{257}, size_t{4096 + 77}}) {
        const auto values = samples(sign, count)[1].values;
        const auto whole = encoded(codec, sign, values);
        const auto expected = decoded(codec, sign, whole, count);
        for (const int64_t step : {256, 768, 4096}) {
          std::vector<std::byte> bytes(whole.size());
          std::vector<float> kept(count);
          const auto size = static_cast<int64_t>(count);
          // From the last part to the first: none depends on another.
          for (int64_t begin = (size - 1) / step * step; begin >= 0; begin -= step) {
            const ElementRange range{size, begin, std::min(size, begin + step)};
            encode(codec, sign, values.data() + begin, bytes.data(), range);
            decode(codec, sign, bytes.data(), kept.data() + begin, range);
          }
          EXPECT_EQ(bytes, whole) << name_of(codec);
          EXPECT_EQ(kept, expected) << name_of(codec);
        }
      }
    }
  }
}

TEST(Codec, PartsBeginAtBlocks) {
  float value = 0;
  std::byte bytes[8];
  EXPECT_THROW(encode(Codec::bf16, Sign::any, &value, bytes, {1000, 128, 256}), std::logic_error);
  EXPECT_THROW(encode(Codec::bf16, Sign::any, &value, bytes, {1000, 256, 300}), std::logic_error);
  EXPECT_THROW(decode(Codec::bf16, Sign::any, bytes, &value, {1, 0, 2}), std::logic_error);
  EXPECT_THROW(encode(Codec::lossless, Sign::any, &value, bytes, {1, 0, 1}), std::logic_error);
}

// Codes first, padded to 4 bytes, then the scales: what is on a disk or on a device reads the same.
TEST(Codec, BytesLieAsDescribed) {
  const auto bytes = encoded(Codec::int8, Sign::any, {1, -2, 0.5f, 0, 2});
  ASSERT_EQ(bytes.size(), 12u);
  const int8_t codes[] = {64, -127, 32, 0, 127};
  EXPECT_EQ(std::memcmp(bytes.data(), codes, 5), 0);
  float scale;
  std::memcpy(&scale, bytes.data() + 8, 4);
  EXPECT_EQ(scale, 2);
  const auto squares = encoded(Codec::int8, Sign::non_negative, {1, 0, 4});
  EXPECT_EQ(static_cast<int>(squares[0]), 64);
  EXPECT_EQ(static_cast<int>(squares[2]), 255);
  const auto dynamic = encoded(Codec::quantization, Sign::any, {1, 0, -4, 3e-6f});
  EXPECT_EQ(static_cast<int>(dynamic[1]), 127);
  EXPECT_EQ(static_cast<int>(dynamic[2]), 255);  // 1, times the scale
  std::memcpy(&scale, dynamic.data() + 4, 4);
  EXPECT_EQ(scale, -4);
}

TEST(Codec, ZerosHaveTheCodeOfZero) {
  const std::vector<float> zeros(kBlock, -0.f);
  const auto even = encoded(Codec::int8, Sign::any, zeros);
  EXPECT_THAT(even, Each(std::byte{0}));
  const auto dynamic = encoded(Codec::quantization, Sign::any, zeros);
  EXPECT_THAT(std::vector(dynamic.begin(), dynamic.begin() + kBlock), Each(std::byte{127}));
  EXPECT_THAT(encoded(Codec::quantization, Sign::non_negative, zeros), Each(std::byte{0}));
}

// On x86 both instruction sets are built; elsewhere there is one.
TEST(Codec, InstructionSetsAgree) {
  for (const Codec codec : kFixed) {
    for (const Sign sign : kSigns) {
      for (const auto& [name, values] : samples(sign, 4096 + 77)) {
        const auto best = encoded(codec, sign, values);
        std::vector<std::byte> plain(best.size());
        const auto count = static_cast<int64_t>(values.size());
        const size_t codes =
            codec == Codec::int8 || codec == Codec::quantization ? (values.size() + 3) / 4 * 4 : 0;
        const auto& kernels = detail::baseline::kKernels;
        kernels.encode(codec, sign)(values.data(), plain.data(),
                                    reinterpret_cast<float*>(plain.data() + codes), count,
                                    detail::map_of(sign));
        EXPECT_EQ(plain, best) << name_of(codec) << " " << name;
      }
    }
  }
}

}  // namespace
}  // namespace lockstep::codec
