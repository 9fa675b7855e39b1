// SPDX-License-Identifier: Apache-2.0
// A master is cut in two: the parameter, which is its upper half rounded to nearest even, and its
// low half, which, taken as a number with a sign, is what the master has beyond the parameter. Only
// the middle, 0x8000, may be above the parameter as well as below it: from an even upper half,
// which is rounded down, and from the odd one before it, which is rounded up. The first is marked.
#include "lockstep/optim/kernels/packed_kernels.h"

#include <bit>
#include <cmath>

#include "lockstep/core/float16.h"

#ifndef LOCKSTEP_ISA
#define LOCKSTEP_ISA baseline
#endif

namespace lockstep::optim::detail::LOCKSTEP_ISA {
namespace {

constexpr uint32_t kSign = 0x80000000;

// `above` is 0x10000 for the marked tie, and otherwise 0.
float joined(uint16_t param, uint16_t remainder, uint32_t above) {
  const uint32_t upper = static_cast<uint32_t>(param) << 16;
  const uint32_t whole = upper + static_cast<uint32_t>(static_cast<int16_t>(remainder)) + above;
  // No master rounds to a zero of the other sign: someone has written the parameter.
  return std::bit_cast<float>(static_cast<int32_t>(whole ^ upper) < 0 ? upper : whole);
}

// Whether a master is the tie that was rounded down.
bool needs_mark(float master) { return (std::bit_cast<uint32_t>(master) & 0x1ffff) == 0x8000; }

uint32_t marked_above(float square) { return (std::bit_cast<uint32_t>(square) & kSign) >> 15; }
float without_mark(float square) {
  return std::bit_cast<float>(std::bit_cast<uint32_t>(square) & ~kSign);
}
// `square` has no mark.
float with_mark(float square, bool mark) {
  return std::bit_cast<float>(std::bit_cast<uint32_t>(square) | (mark ? kSign : 0));
}

// The low half; without a mark, the value next to the tie.
template <Tie tie>
uint16_t remainder_of(float master) {
  const auto low = static_cast<uint16_t>(std::bit_cast<uint32_t>(master));
  return tie == Tie::round ? static_cast<uint16_t>(low - (needs_mark(master) ? 1 : 0)) : low;
}

float load(float stored) { return stored; }
float load(BFloat16 stored) { return widen(stored); }

// The arithmetic of kernels.cpp, operation by operation.
template <class P, class G, Tie tie>
void adamw(const PackedOperands& operands, const AdamWFactors& wide, int64_t count) {
  P* __restrict param = static_cast<P*>(operands.param);
  const G* __restrict grads = static_cast<const G*>(operands.grad);
  uint16_t* __restrict remainder = operands.remainder;
  float* __restrict exp_avg = operands.exp_avg;
  float* __restrict exp_avg_sq = operands.exp_avg_sq;
  const auto decay = static_cast<float>(wide.decay), eps = static_cast<float>(wide.eps);
  const auto beta1 = static_cast<float>(wide.beta1), rest1 = static_cast<float>(1 - wide.beta1);
  const auto beta2 = static_cast<float>(wide.beta2), rest2 = static_cast<float>(1 - wide.beta2);
  const auto step_size = static_cast<float>(wide.step_size);
  const auto root_scale = static_cast<float>(wide.root_scale);
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) {
    const float grad = load(grads[i]);
    float weight;
    float kept = exp_avg_sq[i];
    if constexpr (tie == Tie::none) {
      weight = load(param[i]);
    } else {
      weight = joined(param[i].bits, remainder[i], tie == Tie::mark ? marked_above(kept) : 0);
      if constexpr (tie == Tie::mark) kept = without_mark(kept);
    }
    const float mean = exp_avg[i] * beta1 + rest1 * grad;
    const float square = kept * beta2 + rest2 * grad * grad;
    const float updated =
        weight * decay - step_size * mean / (std::sqrt(square) * root_scale + eps);
    exp_avg[i] = mean;
    if constexpr (tie == Tie::none) {
      exp_avg_sq[i] = square;
      param[i] = updated;
    } else {
      exp_avg_sq[i] = tie == Tie::mark ? with_mark(square, needs_mark(updated)) : square;
      param[i] = narrow<BFloat16>(updated);
      remainder[i] = remainder_of<tie>(updated);
    }
  }
}

template <class G>
PackedAdamWKernel for_bfloat16(Tie tie) {
  return tie == Tie::mark ? adamw<BFloat16, G, Tie::mark> : adamw<BFloat16, G, Tie::round>;
}

PackedAdamWKernel find_adamw(DType param, DType grad, Tie tie) {
  if (param == DType::float32 && grad == DType::float32 && tie == Tie::none) {
    return adamw<float, float, Tie::none>;
  }
  if (param == DType::float32 && grad == DType::bfloat16 && tie == Tie::none) {
    return adamw<float, BFloat16, Tie::none>;
  }
  if (param != DType::bfloat16 || tie == Tie::none) return nullptr;
  if (grad == DType::bfloat16) return for_bfloat16<BFloat16>(tie);
  return grad == DType::float32 ? for_bfloat16<float>(tie) : nullptr;
}

void join(const void* param, const uint16_t* remainder, const float* exp_avg_sq, float* master,
          int64_t count) {
  const auto* params = static_cast<const uint16_t*>(param);
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t above = exp_avg_sq != nullptr ? marked_above(exp_avg_sq[i]) : 0;
    master[i] = joined(params[i], remainder[i], above);
  }
}

void split(const float* master, void* param, uint16_t* remainder, float* exp_avg_sq,
           int64_t count) {
  auto* params = static_cast<BFloat16*>(param);
  for (int64_t i = 0; i < count; ++i) {
    params[i] = narrow<BFloat16>(master[i]);
    if (exp_avg_sq != nullptr) {
      remainder[i] = remainder_of<Tie::mark>(master[i]);
      exp_avg_sq[i] = with_mark(without_mark(exp_avg_sq[i]), needs_mark(master[i]));
    } else {
      remainder[i] = remainder_of<Tie::round>(master[i]);
    }
  }
}

}  // namespace

const PackedKernels packed_kernels = {find_adamw, join, split};

}  // namespace lockstep::optim::detail::LOCKSTEP_ISA
