// SPDX-License-Identifier: Apache-2.0
// A sum of floats depends on its order because every addition rounds. So round only once, each
// square by itself: to whole multiples of a coarse step, and what is left to those of a fine step.
// Whole numbers add up to the same in any order. The steps follow from the largest magnitude, which
// has no order either: with it below 2^e, the coarse step is 2^(2e - 48) and the fine one
// 2^(2e - 97), and either number is at most 2^48 for an element, so that a block of 2^14 is summed
// in 64 bits. What the fine step loses is below 2^-95 of the sum for every element.
#include "lockstep/optim/exact_norm.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <cmath>
#include <utility>
#include <vector>

#include "lockstep/comm/collectives.h"
#include "lockstep/optim/gradient_passes.h"
#include "lockstep/optim/kernels/blocks.h"
#include "lockstep/optim/tensor_memory.h"

namespace lockstep::optim::detail {
namespace {

static_assert(Blocks::kElements <= 1 << 14);

constexpr int kLimbBits = 32;
constexpr int64_t kLimbMask = (int64_t{1} << kLimbBits) - 1;
constexpr int kMantissaBits = 52;
constexpr int kCoarseStep = -48, kFineStep = -97;  // powers of two, relative to the largest square

// The steps for squares below 2^exponent.
Grid grid_for(int exponent) {
  return {.coarse = std::ldexp(1.5, exponent + kCoarseStep + kMantissaBits),
          .fine = std::ldexp(1.5, exponent + kFineStep + kMantissaBits)};
}

double step_of(double grid) { return std::ldexp(grid / 1.5, -kMantissaBits); }

void add(FixedLimbs& total, const FixedSum& sum) {
  size_t limb = 0;
  for (const int64_t number : {sum.coarse, sum.fine}) {
    total[limb++] += number >> kLimbBits;
    total[limb++] += number & kLimbMask;
  }
}

// Carries first: the limbs of a number depend on how it was cut, the number does not.
double number_of(int64_t high, int64_t low) {
  high += low >> kLimbBits;
  low &= kLimbMask;
  return std::ldexp(static_cast<double>(high), kLimbBits) + static_cast<double>(low);
}

FixedLimbs sum_squares(std::span<const at::Tensor> gradients, const Grid& grid) {
  FixedLimbs total = {};
  std::vector<std::pair<FixedSumKernel, const void*>> arrays;
  std::vector<at::Tensor> kept;
  Blocks blocks;
  for (const at::Tensor& gradient : gradients) {
    if (!gradient.is_cpu() || !dtype_of(gradient)) {
      const FixedLimbs sum = sum_squares_by_operators(gradient, grid);
      for (size_t limb = 0; limb < total.size(); ++limb) total[limb] += sum[limb];
      continue;
    }
    // Elements may be taken as they lie.
    kept.push_back(gradient.is_non_overlapping_and_dense() ? gradient : gradient.contiguous());
    arrays.emplace_back(kernels().sum_squares_fixed(*dtype_of(gradient)), kept.back().data_ptr());
    blocks.add(gradient.numel());
  }
  std::vector<FixedSum> parts(static_cast<size_t>(blocks.size()));
  blocks.for_each([&](const Block& block) {
    const auto [run, data] = arrays[static_cast<size_t>(block.array)];
    parts[static_cast<size_t>(block.index)] = run(data, grid, block.begin, block.end);
  });
  for (const FixedSum& part : parts) add(total, part);
  return total;
}

// By two factors: one alone need not be a float64.
at::Tensor times_power_of_two(const at::Tensor& tensor, int exponent) {
  const int half = exponent / 2;
  return tensor.to(at::kDouble).mul(std::ldexp(1.0, half)).mul(std::ldexp(1.0, exponent - half));
}

}  // namespace

FixedLimbs sum_squares_by_operators(const at::Tensor& tensor, const Grid& grid) {
  const at::NoGradGuard no_grad;
  constexpr int64_t kChunk = 1 << 22;  // bounds the memory that this takes
  std::vector<at::Tensor> limbs;
  for (const at::Tensor& chunk : tensor.reshape({-1}).split(kChunk)) {
    const at::Tensor value = chunk.to(at::kDouble), square = value * value;
    const at::Tensor coarse = (square + grid.coarse) - grid.coarse;
    const at::Tensor fine = ((square - coarse) + grid.fine) - grid.fine;
    for (const auto& [part, step] :
         {std::pair{coarse, step_of(grid.coarse)}, std::pair{fine, step_of(grid.fine)}}) {
      const at::Tensor number = (part * (1 / step)).to(at::kLong);
      limbs.push_back(at::bitwise_right_shift(number, kLimbBits).sum());
      limbs.push_back(number.bitwise_and(kLimbMask).sum());
    }
  }
  FixedLimbs total = {};
  if (limbs.empty()) return total;
  const at::Tensor fetched = at::stack(limbs).view({-1, 4}).sum(0).to(at::kCPU);
  for (size_t limb = 0; limb < total.size(); ++limb)
    total[limb] = fetched.data_ptr<int64_t>()[limb];
  return total;
}

double value_of(const FixedLimbs& limbs, const Grid& grid) {
  return number_of(limbs[0], limbs[1]) * step_of(grid.coarse) +
         number_of(limbs[2], limbs[3]) * step_of(grid.fine);
}

double exact_norm(std::span<const at::Tensor> gradients, const comm::Group& group) {
  const at::NoGradGuard no_grad;
  const double largest = norm_of(gradients, NormType::max, group);
  if (largest == 0 || !std::isfinite(largest)) return largest;
  int exponent = 0;
  std::frexp(largest, &exponent);  // largest < 2^exponent

  // Only float64 has magnitudes whose squares are beyond float64.
  constexpr int kSafeExponent = 400;
  std::vector<at::Tensor> scaled;
  int scale = 0;
  if (std::abs(exponent) > kSafeExponent) {
    scale = std::exchange(exponent, 0);
    for (const at::Tensor& gradient : gradients) {
      scaled.push_back(times_power_of_two(gradient, -scale));
      announce_done(gradient);
    }
    gradients = scaled;
  }

  const Grid grid = grid_for(2 * exponent);
  FixedLimbs limbs = {};
  for_each_part(gradients, [&](std::span<const at::Tensor> part) {
    const FixedLimbs sums = sum_squares(part, grid);
    for (size_t limb = 0; limb < limbs.size(); ++limb) limbs[limb] += sums[limb];
  });
  const at::Tensor sums =
      at::from_blob(limbs.data(), {static_cast<int64_t>(limbs.size())}, at::kLong);
  comm::all_reduce(sums, group, {.tag = "grad norm"}).wait();
  return std::ldexp(std::sqrt(value_of(limbs, grid)), scale);
}

}  // namespace lockstep::optim::detail
