// SPDX-License-Identifier: Apache-2.0
// Norms of gradients that several ranks hold, and the one that does not depend on how they are cut.
#include "lockstep/optim/exact_norm.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <mutex>
#include <random>
#include <set>

#include "lockstep/core/error.h"
#include "lockstep/optim/clip.h"
#include "tests/optim/optim_support.h"

namespace lockstep::optim {
namespace {

at::Tensor with_grad(const at::Tensor& gradient) {
  const at::Tensor tensor = at::empty_like(gradient).requires_grad_();
  tensor.mutable_grad() = gradient;
  return tensor;
}

long double exact_square_sum(const at::Tensor& values) {
  const at::Tensor wide = values.to(at::kDouble).contiguous();
  const double* first = wide.data_ptr<double>();
  long double sum = 0;
  for (int64_t i = 0; i < wide.numel(); ++i) {
    sum += static_cast<long double>(first[i]) * static_cast<long double>(first[i]);
  }
  return sum;
}

void expect_norm(const std::vector<at::Tensor>& gradients, long double square_sum) {
  std::vector<at::Tensor> parameters;
  for (const at::Tensor& gradient : gradients) parameters.push_back(with_grad(gradient));
  const auto expected = static_cast<double>(std::sqrt(square_sum));
  const double norm = grad_norm(parameters, {.exact = true});
  EXPECT_LE(std::abs(norm - expected), 1e-15 * expected) << norm << " for " << expected;
}

// Gradients of many magnitudes, half of them of one.
at::Tensor many_magnitudes(int64_t count, at::ScalarType type) {
  const double range = type == at::kHalf ? 2 : 8;
  const at::Tensor magnitudes = at::randn({count}, at::kDouble).mul_(range).exp_();
  return at::where(at::rand({count}) < 0.5, at::randn({count}), at::randn({count}) * magnitudes)
      .to(type);
}

// The tensors of every rank: pieces of any length of any rank, in any order.
std::vector<std::vector<at::Tensor>> cut(const at::Tensor& flat, int ranks, std::mt19937& random) {
  std::vector<std::vector<at::Tensor>> parts(static_cast<size_t>(ranks));
  for (int64_t begin = 0; begin < flat.numel();) {
    const int64_t longest = random() % 2 ? 50 : 40'000;
    const int64_t size = std::min<int64_t>(1 + random() % longest, flat.numel() - begin);
    parts[random() % parts.size()].push_back(flat.narrow(0, begin, size));
    begin += size;
  }
  for (auto& part : parts) std::shuffle(part.begin(), part.end(), random);
  return parts;
}

class ExactNorm : public ::testing::TestWithParam<at::ScalarType> {};

TEST_P(ExactNorm, BitsDoNotDependOnTheSplitIntoTensors) {
  at::manual_seed(1);
  std::mt19937 random(2);
  const at::Tensor flat = many_magnitudes(150'000, GetParam());
  expect_norm({flat}, exact_square_sum(flat));
  const std::vector<at::Tensor> whole = {with_grad(flat.clone())};
  const double norm = clip_grad_norm_(whole, 1, {.exact = true});
  for (int i = 0; i < 20; ++i) {
    const int ranks = 1 + i % 4;
    const auto parts = cut(flat, ranks, random);
    const at::Tensor clipped = at::empty_like(flat);
    comm::run_threads(ranks, [&](const comm::Group& group) {
      std::vector<at::Tensor> parameters;
      for (const at::Tensor& piece : parts[static_cast<size_t>(group.rank())]) {
        parameters.push_back(with_grad(piece.clone()));
      }
      EXPECT_EQ(clip_grad_norm_(parameters, 1, {.group = group, .exact = true}), norm);
      for (size_t k = 0; k < parameters.size(); ++k) {
        const at::Tensor& piece = parts[static_cast<size_t>(group.rank())][k];
        clipped.narrow(0, piece.storage_offset(), piece.numel()).copy_(parameters[k].grad());
      }
    });
    EXPECT_TRUE(same_bits(clipped, whole[0].grad()));
  }
}

TEST_P(ExactNorm, BitsDoNotDependOnThreadsAndStrides) {
  const int threads = at::get_num_threads();
  at::manual_seed(3);
  const at::Tensor flat = many_magnitudes(120'000, GetParam());
  const auto norm_of = [](const at::Tensor& gradient) {
    return grad_norm(std::vector{with_grad(gradient)}, {.exact = true});
  };
  at::set_num_threads(1);
  const double norm = norm_of(flat);
  at::set_num_threads(3);
  EXPECT_EQ(norm_of(flat), norm);
  at::set_num_threads(threads);
  EXPECT_EQ(norm_of(flat.flip(0)), norm);
  EXPECT_EQ(norm_of(flat.view({300, 400}).t()), norm);
  const at::Tensor gaps = at::ones({120'000, 2}, flat.options());
  gaps.select(1, 1).copy_(flat);
  EXPECT_EQ(norm_of(gaps.select(1, 1)), norm);
}

TEST_P(ExactNorm, OperatorsAndKernelsGiveTheSameSums) {
  constexpr int64_t kCount = 16'384, kMany = (int64_t{1} << 22) + 100;
  at::manual_seed(4);
  const at::Tensor few = many_magnitudes(kCount, GetParam());
  const double largest = few.to(at::kDouble).abs().max().item<double>();
  const int exponent = 2 * (std::ilogb(largest) + 1);
  const detail::Grid grid = {std::ldexp(1.5, exponent + 4), std::ldexp(1.5, exponent - 45)};
  const DType dtype = GetParam() == at::kDouble  ? DType::float64
                      : GetParam() == at::kFloat ? DType::float32
                      : GetParam() == at::kHalf  ? DType::float16
                                                 : DType::bfloat16;
  const auto number = [](const detail::FixedLimbs& limbs, size_t i) {
    return (limbs[2 * i] << 32) + limbs[2 * i + 1];
  };
  const detail::FixedSum sum =
      detail::kernels().sum_squares_fixed(dtype)(few.data_ptr(), grid, 0, kCount);
  const auto limbs = detail::sum_squares_by_operators(few, grid);
  EXPECT_GT(sum.coarse, 0);
  EXPECT_EQ(number(limbs, 0), sum.coarse);
  EXPECT_EQ(number(limbs, 1), sum.fine);
  // More than one piece at a time: repeats of the same value.
  const at::Tensor repeats = few.narrow(0, 7, 1).expand({kMany});
  const auto once = detail::sum_squares_by_operators(repeats.narrow(0, 0, 1), grid);
  const auto often = detail::sum_squares_by_operators(repeats, grid);
  for (size_t i = 0; i < once.size(); ++i) EXPECT_EQ(often[i], once[i] * kMany);
}

INSTANTIATE_TEST_SUITE_P(, ExactNorm,
                         ::testing::Values(at::kFloat, at::kDouble, at::kHalf, at::kBFloat16),
                         [](const auto& info) { return c10::toString(info.param); });

TEST(ExactNormAccuracy, ASpikeAmongManySmallValues) {
  constexpr int64_t kCount = 10'000'000;
  const at::Tensor values = at::empty({kCount});
  // On both sides of the coarse step, of the fine step, and denormal.
  for (const float small : {3e-4f, 0x1.3p-24f, 0x1.7p-25f, 1e-10f, 0x1.3p-49f, 1e-20f, 1e-45f}) {
    values.fill_(small);
    values[kCount / 3].fill_(1.75f);
    const long double square = static_cast<long double>(small) * small;
    expect_norm({values}, 1.75L * 1.75L + square * (kCount - 1));
  }
}

TEST(ExactNormAccuracy, BlocksOfTheLargestValue) {
  for (const float value : {0x1.fffffep-1f, 1.0f, 0x1.fffffep20f}) {
    const long double square = static_cast<long double>(value) * value;
    expect_norm({at::full({50'000}, value)}, square * 50'000);
  }
}

TEST(ExactNormAccuracy, CarriesDoNotMatter) {
  const detail::Grid grid = {0x1.8p4, 0x1.8p-45};
  // A low limb that is no double by itself.
  constexpr int64_t kHigh = int64_t{1} << 22, kLow = (kHigh << 32) + 2;
  EXPECT_EQ(detail::value_of({5 - kHigh, kLow, 0, 0}, grid), detail::value_of({5, 2, 0, 0}, grid));
  EXPECT_EQ(detail::value_of({0, 0, 5 - kHigh, kLow}, grid), detail::value_of({0, 0, 5, 2}, grid));
  EXPECT_EQ(detail::value_of({1, 0, 0, 0}, grid), std::ldexp(1, 32 - 48));
  EXPECT_EQ(detail::value_of({0, 0, -1, 1}, grid), std::ldexp(1 - std::ldexp(1, 32), -97));
}

TEST(ExactNormAccuracy, TheEndsOfTheRange) {
  at::manual_seed(5);
  const at::Tensor normal = at::randn({20'000}, at::kDouble);
  for (const double scale : {1e-44, 1e-41, 1e-30, 1e30, 1e37}) {
    const at::Tensor values = (normal * scale).to(at::kFloat);
    expect_norm({values}, exact_square_sum(values));
  }
  for (const double scale : {1e-323, 1e-320, 1e-308, 1e-200, 1e-121, 1e120, 1e200, 1e305}) {
    const at::Tensor values = normal * scale;
    expect_norm({values}, exact_square_sum(values));
    expect_norm({values, at::zeros({5})}, exact_square_sum(values));
  }
  const at::Tensor one = at::ones({10}), huge = normal * 1e150, large = normal * 1e38;
  expect_norm({one, huge}, exact_square_sum(huge));
  expect_norm({one, large}, exact_square_sum(large));
  expect_norm({one, normal * 1e-300}, 10);
  expect_norm({at::full({3}, 1.0)}, 3);  // a power of two
  EXPECT_EQ(grad_norm(std::vector{with_grad(at::zeros({7}))}, {.exact = true}), 0);
  EXPECT_EQ(grad_norm(std::vector<at::Tensor>{}, {.exact = true}), 0);
}

class GroupNorm : public ::testing::TestWithParam<std::string> {
 protected:
  static void run(int ranks, const std::function<void(comm::Group)>& body) {
    comm::run_threads(ranks, body, {.backend = GetParam()});
  }
};

TEST_P(GroupNorm, IsThatOfAllParts) {
  at::manual_seed(6);
  const at::Tensor flat = at::randn({3000});
  const auto whole = std::vector{with_grad(flat)};
  const double l2 = grad_norm(whole), largest = grad_norm(whole, {.type = NormType::max});
  const double exact = grad_norm(whole, {.exact = true});
  std::mutex mutex;
  std::set<double> seen;
  run(3, [&](const comm::Group& group) {
    std::vector<at::Tensor> mine;  // rank 1 has none
    if (group.rank() == 0) mine = {with_grad(flat.narrow(0, 0, 1000))};
    if (group.rank() == 2) mine = {with_grad(flat.narrow(0, 1000, 2000).clone())};
    const double norm = clip_grad_norm_(mine, 1e9, {.group = group});
    EXPECT_NEAR(norm, l2, 1e-14 * l2);
    EXPECT_EQ(grad_norm(mine, {.group = group, .exact = true}), exact);
    for (const bool with_exact : {false, true}) {
      EXPECT_EQ(grad_norm(mine, {.type = NormType::max, .group = group, .exact = with_exact}),
                largest);
    }
    clip_grad_norm_(mine, 1, {.group = group});
    EXPECT_NEAR(grad_norm(mine, {.group = group}), 1, 1e-5);
    const std::lock_guard lock(mutex);
    seen.insert(norm);
  });
  EXPECT_EQ(seen.size(), 1u);
}

TEST_P(GroupNorm, ThatIsNotFiniteIsSoOnAllRanks) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  run(3, [](const comm::Group& group) {
    for (const double bad : {-kInfinity, std::nan("")}) {
      for (const auto type : {NormType::l2, NormType::max}) {
        for (const bool exact : {false, true}) {
          for (int where = 0; where < 3; ++where) {
            const at::Tensor gradient = at::ones({10});
            if (group.rank() == where) gradient[3].fill_(bad);
            if (group.rank() == (where + 1) % 3) gradient[4].fill_(kInfinity);
            const auto mine = std::vector{with_grad(gradient)};
            NormOptions options{.type = type, .group = group, .exact = exact};
            const double norm = grad_norm(mine, options);
            EXPECT_TRUE(std::isnan(bad) ? std::isnan(norm) : norm == kInfinity) << norm;
            options.error_if_nonfinite = true;
            expect_error<Error>("[grad_norm] ... norm ... gradients",
                                [&] { clip_grad_norm_(mine, 1, options); });
          }
        }
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(, GroupNorm, ::testing::Values("thread", "gloo"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace lockstep::optim
