// SPDX-License-Identifier: Apache-2.0
#include "lockstep/nn/random/random.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/nn/random/random_kernels.h"
#include "lockstep/nn/random/random_runs.h"
#include "tests/support/says.h"

namespace lockstep::nn {
namespace {

using layout::Box;
using layout::Shape;
using test::says;
using testing::HasSubstr;
using testing::ThrowsMessage;

const RandomKey kRandomKey = random_key(5, "test", "tensor", {.step = 3, .micro_batch = 1});

const std::vector<Distribution> kDistributions = {
    Distribution::uniform(0, 1), Distribution::uniform(-3, 0.5), Distribution::normal(0, 1),
    Distribution::normal(1.5, 0.02), Distribution::truncated_normal(0, 1, -0.5, 2)};

at::Tensor filled(const Shape& shape, const Distribution& distribution,
                  at::ScalarType dtype = at::kFloat) {
  auto tensor = at::full(shape, -100, dtype);
  fill(tensor, kRandomKey, distribution);
  return tensor;
}

// The definition, element by element.
float expected(const Distribution& distribution, uint64_t index) {
  for (RandomKey key = kRandomKey;; key.tensor += 0x9E3779B97F4A7C15) {
    const float x =
        distribution.kind == Distribution::Kind::normal ? normal(key, index) : uniform(key, index);
    const float value = std::fma(x, distribution.scale, distribution.offset);
    if (value >= distribution.low && value <= distribution.high) return value;
  }
}

at::Tensor cut(at::Tensor whole, const Box& box) {
  for (size_t dim = 0; dim < box.ranges.size(); ++dim) {
    const auto& range = box.ranges[dim];
    whole = whole.narrow(static_cast<int64_t>(dim), range.begin, range.size());
  }
  return whole;
}

TEST(Fill, IsTheFunctionOfKeyAndIndex) {
  for (const auto& distribution : kDistributions) {
    for (const int64_t size : {1, 3, 4, 63, 64, 65, 1023, 5000}) {
      const auto values = filled({size}, distribution);
      for (int64_t i = 0; i < size; ++i) {
        ASSERT_EQ(values.data_ptr<float>()[i], expected(distribution, static_cast<uint64_t>(i)));
      }
    }
  }
}

TEST(Fill, SlicesAreTheElementsOfTheWhole) {
  std::mt19937 random(1);
  const auto below = [&](int64_t n) {
    return std::uniform_int_distribution<int64_t>(0, n)(random);
  };
  for (int round = 0; round < 300; ++round) {
    Shape shape;
    Box box;
    const auto dims = below(5);
    for (int64_t dim = 0; dim < dims; ++dim) {
      shape.push_back(1 + below(dims == 1 ? 4000 : 9));
      const auto begin = below(shape.back());
      // Whole dimensions often: they make the runs long and merge.
      box.ranges.push_back(below(1) ? layout::Range{begin, begin + below(shape.back() - begin)}
                                    : layout::Range{0, shape.back()});
    }
    if (dims == 0) box = Box::whole(shape);
    const auto& distribution = kDistributions[static_cast<size_t>(round) % kDistributions.size()];
    const auto part =
        dims == 0 ? filled(shape, distribution) : cut(filled(shape, distribution), box);
    auto slice = at::full(part.sizes(), -100, at::kFloat);
    fill(slice, kRandomKey, distribution, Slice{shape, box});
    ASSERT_TRUE(at::equal(slice, part)) << layout::describe(shape) << " " << box.describe();
  }
}

TEST(Fill, ReachesElementsBeyondFourBillionBlocks) {
  const Shape shape = {int64_t{1} << 20, int64_t{1} << 20};
  const Box box = {{{(int64_t{1} << 20) - 3, int64_t{1} << 20}, {77, 200}}};
  auto slice = at::empty({3, 123});
  fill(slice, kRandomKey, Distribution::normal(0, 1), Slice{shape, box});
  for (int64_t row = 0; row < 3; ++row) {
    for (int64_t column = 0; column < 123; ++column) {
      const int64_t index = (box.ranges[0].begin + row) * shape[1] + 77 + column;
      ASSERT_EQ(slice[row][column].item<float>(), normal(kRandomKey, static_cast<uint64_t>(index)));
    }
  }
}

TEST(Fill, CarriesIntoTheUpperWordOfTheCounter) {
  const int64_t carry = int64_t{1} << 34;  // element 0 of block 2^32
  auto slice = at::empty({400});
  fill(slice, kRandomKey, Distribution::normal(0, 1),
       Slice{{2 * carry}, {{{carry - 200, carry + 200}}}});
  for (int64_t i = 0; i < 400; ++i) {
    ASSERT_EQ(slice[i].item<float>(), normal(kRandomKey, static_cast<uint64_t>(carry - 200 + i)));
  }
}

TEST(Fill, BitsDoNotDependOnTheNumberOfThreads) {
  const int before = at::get_num_threads();
  at::set_num_threads(1);
  const auto alone = filled({300'001}, Distribution::normal(0, 1));
  for (const int threads : {2, 3, 7}) {
    at::set_num_threads(threads);
    EXPECT_TRUE(at::equal(filled({300'001}, Distribution::normal(0, 1)), alone)) << threads;
  }
  at::set_num_threads(before);
}

// Kernels for a newer processor must not be noticed but by the clock.
TEST(Fill, BitsDoNotDependOnTheInstructionSet) {
  constexpr int64_t kCount = 4099;
  for (const auto& distribution : kDistributions) {
    std::vector<float> chosen(kCount), baseline(kCount);
    cpu_kernels().draw(kRandomKey, 3, kCount, distribution, chosen.data());
    baseline::kKernels.draw(kRandomKey, 3, kCount, distribution, baseline.data());
    EXPECT_EQ(chosen, baseline);
  }
  const Drop drop{.threshold = 1u << 30, .scale = 4.0 / 3};
  std::vector<float> chosen(kCount, 1), baseline(kCount, 1);
  cpu_kernels().drop_float(kRandomKey, 3, kCount, drop, chosen.data(), chosen.data());
  baseline::kKernels.drop_float(kRandomKey, 3, kCount, drop, baseline.data(), baseline.data());
  EXPECT_EQ(chosen, baseline);
}

TEST(Fill, OtherTypesHoldTheFloatValues) {
  for (const auto& distribution : kDistributions) {
    const auto values = filled({3, 701}, distribution);
    for (const auto dtype : {at::kDouble, at::kHalf, at::kBFloat16}) {
      EXPECT_TRUE(at::equal(filled({3, 701}, distribution, dtype), values.to(dtype)));
    }
  }
}

TEST(Fill, FollowsTheIndicesNotTheMemory) {
  const auto distribution = Distribution::normal(0, 1);
  auto transposed = at::zeros({30, 20}).t();
  fill(transposed, kRandomKey, distribution);
  EXPECT_TRUE(at::equal(transposed, filled({20, 30}, distribution)));
}

TEST(Fill, LeavesAutogradAloneAndCountsAsAWrite) {
  auto leaf = at::zeros({10}).requires_grad_();
  const auto squares = (leaf * leaf).sum();
  const auto version = leaf._version();
  fill(leaf, kRandomKey, Distribution::normal(0, 1));
  EXPECT_TRUE(leaf.is_leaf());
  EXPECT_GT(leaf._version(), version);
  EXPECT_THROW(squares.backward(), c10::Error);  // what it saved has changed
}

TEST(Fill, TakesEmptyAndMetaTensors) {
  auto empty = at::empty({0, 4});
  fill(empty, kRandomKey, Distribution::normal(0, 1));
  fill(empty, kRandomKey, Distribution::normal(0, 1), Slice{{8, 4}, {{{8, 8}, {0, 4}}}});
  auto meta = at::empty({1 << 20, 1 << 20}, at::TensorOptions(at::kMeta));
  fill(meta, kRandomKey, Distribution::normal(0, 1));
}

TEST(Fill, RefusesWhatDoesNotFit) {
  auto tensor = at::empty({2, 3});
  const auto fill_slice = [&](const Shape& shape, const Box& box) {
    return [=] { fill(tensor, kRandomKey, Distribution::normal(0, 1), Slice{shape, box}); };
  };
  EXPECT_THAT(fill_slice({4, 3}, {{{3, 5}, {0, 3}}}),
              ThrowsMessage<ConfigError>(says("[fill] ... slice [3:5, 0:3] ... (4, 3)")));
  EXPECT_THAT(fill_slice({12}, {{{0, 6}, {0, 1}}}), ThrowsMessage<ConfigError>(HasSubstr("(12)")));
  EXPECT_THAT(fill_slice({4, 3}, {{{0, 3}, {0, 2}}}),
              ThrowsMessage<ConfigError>(says("(2, 3) ... slice [0:3, 0:2] ... (3, 2)")));
  const Shape many(10, 3), twos(10, 2);
  const Box cut_in_all{std::vector<layout::Range>(10, {0, 2})};
  EXPECT_THAT(
      [&] {
        fill(at::empty(twos), kRandomKey, Distribution::normal(0, 1), Slice{many, cut_in_all});
      },
      ThrowsMessage<ConfigError>(says("more than 8 dimensions")));
  EXPECT_THAT([] { fill(at::empty({2}, at::kLong), kRandomKey, Distribution::normal(0, 1)); },
              ThrowsMessage<ConfigError>(says("dtype is Long ... floating")));
}

TEST(Distribution, RefusesWhatIsNone) {
  const double infinity = std::numeric_limits<double>::infinity();
  EXPECT_THAT([] { Distribution::normal(0, -1); },
              ThrowsMessage<ConfigError>(says("deviation is -1 ... negative")));
  EXPECT_THROW(Distribution::normal(0, std::nan("")), ConfigError);
  EXPECT_THROW(Distribution::normal(infinity, 1), ConfigError);
  EXPECT_THROW(Distribution::normal(0, 1e300), ConfigError);
  EXPECT_THROW(Distribution::uniform(1, 0), ConfigError);
  EXPECT_THROW(Distribution::uniform(0, infinity), ConfigError);
  EXPECT_THROW(Distribution::truncated_normal(0, 1, 3, 9), ConfigError);
  EXPECT_THROW(Distribution::truncated_normal(0, 0, 1, 2), ConfigError);
  EXPECT_THAT([] { Distribution::truncated_normal(0, 1, 0, 0.01); },
              ThrowsMessage<ConfigError>(says("at least 0.01")));
}

double normal_below(double x) { return 0.5 * std::erfc(-x / std::sqrt(2.0)); }

TEST(TruncatedNormal, HasTheShapeOfTheNormalInside) {
  const double low = -0.5, high = 2, held = normal_below(high) - normal_below(low);
  const int64_t n = 500'000;
  const auto sorted =
      std::get<0>(filled({n}, Distribution::truncated_normal(0, 1, low, high)).sort());
  double largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    const double x = sorted.data_ptr<float>()[i];
    ASSERT_TRUE(x >= low && x <= high);
    const double below = (normal_below(x) - normal_below(low)) / held;
    largest = std::max(largest, std::abs(below - static_cast<double>(i) / static_cast<double>(n)));
  }
  EXPECT_LT(largest * std::sqrt(static_cast<double>(n)), 1.95);
}

}  // namespace
}  // namespace lockstep::nn
