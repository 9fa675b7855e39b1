// SPDX-License-Identifier: Apache-2.0
// The parallel loop and the kernels by themselves.
#include "lockstep/optim/kernels/kernels.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <atomic>
#include <bit>
#include <cmath>
#include <limits>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "lockstep/optim/kernels/blocks.h"

namespace lockstep::optim::detail {
namespace {

TEST(Blocks, CoverEveryElementOnceOnEveryNumberOfThreads) {
  const int threads = at::get_num_threads();
  const std::vector<int64_t> sizes = {0, 1, 16384, 16385, 0, 5, 7, 100000, 0};
  Blocks blocks;
  for (const int64_t size : sizes) blocks.add(size);
  ASSERT_EQ(blocks.size(), 1 + 1 + 2 + 1 + 1 + 7);
  for (const int count : {1, 2, 3, 8}) {
    at::set_num_threads(count);
    std::vector<std::vector<int>> seen;
    for (const int64_t size : sizes) seen.emplace_back(size, 0);
    std::vector<std::atomic<int>> indices(blocks.size());
    blocks.for_each([&](const Block& block) {
      EXPECT_EQ(block.begin % Blocks::kElements, 0);
      for (int64_t i = block.begin; i < block.end; ++i) ++seen[block.array][i];
      ++indices[block.index];
    });
    for (const auto& array : seen) {
      for (const int times : array) ASSERT_EQ(times, 1);
    }
    for (const auto& times : indices) EXPECT_EQ(times, 1);
  }
  at::set_num_threads(threads);
}

// Two blocks wait for each other, so they end only if two threads run them.
TEST(Blocks, RunOnTorchsThreads) {
  const int threads = at::get_num_threads();
  at::set_num_threads(2);
  Blocks blocks;
  blocks.add(2 * Blocks::kElements);
  std::atomic<int> arrived = 0;
  std::mutex mutex;
  std::set<std::thread::id> ids;
  blocks.for_each([&](const Block&) {
    for (++arrived; arrived < 2;) std::this_thread::yield();
    const std::lock_guard lock(mutex);
    ids.insert(std::this_thread::get_id());
  });
  at::set_num_threads(threads);
  EXPECT_EQ(ids.size(), 2u);
}

TEST(Blocks, NothingToDo) {
  Blocks blocks;
  blocks.for_each([](const Block&) { FAIL(); });
  blocks.add(0);
  blocks.for_each([](const Block&) { FAIL(); });
}

float widened(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

// Against the definition: up where the random number exceeds what is missing to the next value.
TEST(StochasticRounding, FollowsItsDefinition) {
  for (const uint32_t bits : {0x3F80624Eu, 0xBF80624Eu, 0x00000001u, 0x80012345u, 0x42F6E979u}) {
    const auto value = std::bit_cast<float>(bits);
    const uint32_t upper = bits >> 16, cut = bits & 0xffff;
    for (const uint32_t random : {0u, 1u, 0xffffu - cut, 0x10000u - cut, 0xffffu}) {
      if (random > 0xffff) continue;
      EXPECT_EQ(stochastic_bfloat16(value, random), upper + (cut + random > 0xffff ? 1 : 0))
          << bits << " " << random;
    }
  }
  double sum = 0;  // over all random numbers: the value itself
  for (uint32_t random = 0; random < 0x10000; ++random)
    sum += widened(stochastic_bfloat16(1.003f, random));
  EXPECT_EQ(sum / 0x10000, 1.003f);
}

TEST(StochasticRounding, FiniteStaysFiniteAndNothingElseChanges) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const float largest = widened(0x7f7f);
  for (const uint32_t random : {0u, 1u, 0x8000u, 0xffffu}) {
    EXPECT_EQ(widened(stochastic_bfloat16(std::numeric_limits<float>::max(), random)), largest);
    EXPECT_EQ(widened(stochastic_bfloat16(-std::numeric_limits<float>::max(), random)), -largest);
    EXPECT_EQ(widened(stochastic_bfloat16(kInfinity, random)), kInfinity);
    EXPECT_EQ(widened(stochastic_bfloat16(-kInfinity, random)), -kInfinity);
    EXPECT_EQ(stochastic_bfloat16(0.0f, random), 0);
    EXPECT_EQ(stochastic_bfloat16(-0.0f, random), 0x8000);
    EXPECT_EQ(widened(stochastic_bfloat16(0.5f, random)), 0.5f);
    for (const uint32_t nan : {0x7f800001u, 0x7fffffffu, 0xff800001u, 0xffffffffu}) {
      EXPECT_TRUE(std::isnan(widened(stochastic_bfloat16(std::bit_cast<float>(nan), random))));
    }
  }
}

#ifdef __x86_64__
TEST(Kernels, InstructionSetsGiveTheSameBits) {
  if (&kernels() != &x86_v3::kernels) return;  // this processor has only one of the two
  constexpr int64_t kCount = 1003;
  at::manual_seed(2);
  const auto types = {std::pair{DType::float64, at::kDouble},
                      {DType::float32, at::kFloat},
                      {DType::float16, at::kHalf},
                      {DType::bfloat16, at::kBFloat16}};
  for (const auto& [dtype, type] : types) {
    const auto state = type == at::kDouble ? at::kDouble : at::kFloat;
    const at::Tensor grad = at::randn({kCount}).to(type), start = at::randn({kCount}).to(type);
    std::vector<std::vector<at::Tensor>> results;
    for (const Kernels* set : {&baseline::kernels, &x86_v3::kernels}) {
      at::Tensor param = start.clone(), master = start.to(state, false, true);
      at::Tensor first = at::zeros({kCount}, state), second = at::zeros({kCount}, state);
      const Operands operands = {param.data_ptr(), grad.data_ptr(), master.data_ptr(),
                                 first.data_ptr(), second.data_ptr()};
      const AdamWFactors adamw = {0.99, 0.9, 0.999, 1e-8, 1e-2, 3};
      const SgdFactors sgd = {0.1, 0.01, 0.9, 0.5, 0.9};
      for (int step = 0; step < 3; ++step) set->adamw(dtype, dtype)(operands, adamw, 0, kCount);
      at::Tensor small = at::zeros({2, kCount}, at::kBFloat16);
      if (dtype != DType::float64) {
        Operands rounded = operands;
        rounded.first = small[0].data_ptr();
        rounded.second = small[1].data_ptr();
        const MomentDraws draws{{.tensor = 5, .step = 2}, 3, 300, 1000};
        for (const auto& [begin, end] : {std::pair{0, 7}, {7, 650}, {650, 1003}})
          set->rounded_adamw(dtype, dtype)(rounded, adamw, draws, begin, end);
      }
      set->sgd(SgdKind::nesterov, dtype, dtype)(operands, sgd, 0, kCount);
      const double norm = set->sum_squares(dtype)(param.data_ptr(), 0, kCount);
      const FixedSum fixed =
          set->sum_squares_fixed(dtype)(param.data_ptr(), {0x1.8p20, 0x1.8p-29}, 0, kCount);
      const double largest = set->scale(dtype)(param.data_ptr(), 0.3, 0, kCount);
      results.push_back(
          {param, master, first, second, small,
           at::tensor({norm, largest, set->max_abs(dtype)(param.data_ptr(), 0, kCount)},
                      at::kDouble),
           at::tensor({fixed.coarse, fixed.fine}, at::kLong)});
    }
    for (size_t i = 0; i < results[0].size(); ++i) {
      EXPECT_TRUE(at::equal(results[0][i], results[1][i])) << name_of(dtype) << " " << i;
    }
  }
}
#endif

}  // namespace
}  // namespace lockstep::optim::detail
