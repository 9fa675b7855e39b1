// SPDX-License-Identifier: Apache-2.0
#include "lockstep/fabric/reduce.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "lockstep/core/error.h"

namespace lockstep::fabric {
namespace {

template <class T>
std::vector<T> reduced(DType dtype, ReduceOp op, const std::vector<std::vector<T>>& inputs) {
  std::vector<T> output(inputs[0].size());
  std::vector<const std::byte*> sources;
  for (const auto& input : inputs)
    sources.push_back(reinterpret_cast<const std::byte*>(input.data()));
  std::byte* target = reinterpret_cast<std::byte*>(output.data());
  reduce(dtype, op, std::span(&target, 1), sources, output.size());
  return output;
}

float tree_sum(const std::vector<float>& values, size_t first, size_t last) {
  if (last - first == 1) return values[first];
  size_t half = 1;
  while (2 * half < last - first) half *= 2;
  return tree_sum(values, first, first + half) + tree_sum(values, first + half, last);
}

TEST(Reduce, SumsInTheOrderOfABinaryTree) {
  std::mt19937 random(1);
  std::uniform_real_distribution<float> uniform(-1e3f, 1e3f);
  for (size_t ranks = 1; ranks <= 9; ++ranks) {
    for (const size_t count : {1u, 7u, 511u, 512u, 513u, 2000u}) {
      std::vector<std::vector<float>> inputs(ranks, std::vector<float>(count));
      for (auto& input : inputs) {
        for (float& value : input) value = uniform(random);
      }
      const auto output = reduced(DType::float32, ReduceOp::sum, inputs);
      for (size_t i = 0; i < count; ++i) {
        std::vector<float> column;
        for (const auto& input : inputs) column.push_back(input[i]);
        ASSERT_EQ(output[i], tree_sum(column, 0, ranks)) << ranks << " ranks, element " << i;
      }
    }
  }
}

TEST(Reduce, WritesEveryOutputAlsoWhereOneIsAnInput) {
  for (const size_t ranks : {2u, 3u, 4u}) {
    std::vector<std::vector<float>> values(ranks, std::vector<float>(1000, 1.5f));
    std::vector<std::byte*> outputs;
    std::vector<const std::byte*> inputs;
    for (auto& v : values) {
      outputs.push_back(reinterpret_cast<std::byte*>(v.data()));
      inputs.push_back(outputs.back());
    }
    reduce(DType::float32, ReduceOp::sum, outputs, inputs, 1000);
    for (const auto& v : values)
      EXPECT_EQ(v, std::vector<float>(1000, 1.5f * static_cast<float>(ranks)));
  }
}

uint16_t to_bfloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return static_cast<uint16_t>(bits >> 16);
}

TEST(Reduce, SixteenBitFloatsAreSummedInFloat32AndRoundedOnce) {
  // 256 + 1 + 1 + 1 is 259 in float32 and rounds to 260 in bfloat16 (steps of 2, ties to even);
  // adding one at a time in bfloat16 would stay at 256.
  const std::vector<std::vector<uint16_t>> inputs{
      {to_bfloat16(256)}, {to_bfloat16(1)}, {to_bfloat16(1)}, {to_bfloat16(1)}};
  EXPECT_EQ(reduced(DType::bfloat16, ReduceOp::sum, inputs)[0], to_bfloat16(260));
  // float16 2048 + 1 + 1 + 1 = 2051 -> 2052; one at a time 2048.
  const std::vector<std::vector<uint16_t>> halves{{0x6800}, {0x3c00}, {0x3c00}, {0x3c00}};
  EXPECT_EQ(reduced(DType::float16, ReduceOp::sum, halves)[0], 0x6802);
}

TEST(Reduce, BFloat16RoundsToNearestEvenAndKeepsNan) {
  const auto sum = [](float a, float b) {
    return reduced<uint16_t>(DType::bfloat16, ReduceOp::sum,
                             {{to_bfloat16(a)}, {to_bfloat16(b)}})[0];
  };
  EXPECT_EQ(sum(256, 1), to_bfloat16(256));  // 257 lies between 256 and 258: even wins
  EXPECT_EQ(sum(258, 1), to_bfloat16(260));
  const uint16_t nan =
      sum(std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity());
  EXPECT_EQ(nan & 0x7f80, 0x7f80);
  EXPECT_NE(nan & 0x7f, 0);
}

TEST(Reduce, WholeNumbersWrapAndAverageDropsTheRemainder) {
  EXPECT_EQ(reduced<int8_t>(DType::int8, ReduceOp::sum, {{100}, {100}})[0],
            static_cast<int8_t>(200));
  EXPECT_EQ(reduced<int32_t>(DType::int32, ReduceOp::avg, {{-3}, {-4}})[0], -3);
  EXPECT_EQ(reduced<int64_t>(DType::int64, ReduceOp::product, {{3}, {-5}, {7}})[0], -105);
  EXPECT_EQ(reduced<uint8_t>(DType::uint8, ReduceOp::max, {{3}, {200}, {7}})[0], 200);
}

template <class T>
void expect_exact_averages(DType dtype) {
  __extension__ using Wide = __int128;
  constexpr T kMost = std::numeric_limits<T>::max(), kLeast = std::numeric_limits<T>::min();
  const std::vector<std::vector<T>> parts{
      {kMost, kLeast, kMost, static_cast<T>(kLeast + 1), 3, static_cast<T>(-3)},
      {kMost, kLeast, static_cast<T>(kMost - 1), kLeast, 4, static_cast<T>(-4)},
      {kMost, kLeast, kLeast, static_cast<T>(kLeast + 5), 1, static_cast<T>(-1)}};
  for (const size_t ranks : {1u, 2u, 3u, 7u, 256u, 300u}) {  // 256 is 0 in eight bits
    std::vector<std::vector<T>> inputs;
    for (size_t rank = 0; rank < ranks; ++rank) inputs.push_back(parts[rank % parts.size()]);
    const auto averages = reduced<T>(dtype, ReduceOp::avg, inputs);
    for (size_t i = 0; i < averages.size(); ++i) {
      Wide sum = 0;
      for (const auto& input : inputs) sum += input[i];
      EXPECT_EQ(averages[i], static_cast<T>(sum / static_cast<Wide>(ranks)))
          << ranks << " ranks, element " << i;
    }
  }
}

TEST(Reduce, AveragesOfWholeNumbersDoNotWrap) {
  expect_exact_averages<int64_t>(DType::int64);
  expect_exact_averages<int32_t>(DType::int32);
  expect_exact_averages<int8_t>(DType::int8);
  expect_exact_averages<uint8_t>(DType::uint8);
}

TEST(Reduce, MinAndMaxKeepNan) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const ReduceOp op : {ReduceOp::min, ReduceOp::max}) {
    EXPECT_TRUE(std::isnan(reduced<float>(DType::float32, op, {{nan}, {1}})[0]));
    EXPECT_TRUE(std::isnan(reduced<float>(DType::float32, op, {{1}, {nan}, {2}})[0]));
  }
}

TEST(Reduce, BoolMeansAnyAndAll) {
  EXPECT_EQ(reduced<uint8_t>(DType::boolean, ReduceOp::sum, {{0, 1, 1}, {0, 0, 1}}),
            (std::vector<uint8_t>{0, 1, 1}));
  EXPECT_EQ(reduced<uint8_t>(DType::boolean, ReduceOp::product, {{0, 1, 1}, {0, 0, 1}}),
            (std::vector<uint8_t>{0, 0, 1}));
  EXPECT_THROW(check_reducible(DType::boolean, ReduceOp::avg), ConfigError);
}

}  // namespace
}  // namespace lockstep::fabric
