// SPDX-License-Identifier: Apache-2.0
#include "lockstep/optim/kernels/kernels.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <type_traits>

#include "lockstep/core/float16.h"
#include "lockstep/core/philox_groups.h"

#ifndef LOCKSTEP_ISA
#define LOCKSTEP_ISA baseline
#endif

namespace lockstep::optim::detail::LOCKSTEP_ISA {
namespace {

// What a stored element is computed in; the same type where there is no master.
template <class T>
using Value = std::conditional_t<std::is_same_v<T, double>, double, float>;
template <class T>
constexpr bool kHasMaster = sizeof(T) == 2;

template <class T>
Value<T> load(T stored) {
  if constexpr (kHasMaster<T>) {
    return widen(stored);
  } else {
    return stored;
  }
}

template <class T>
T store(Value<T> value) {
  if constexpr (kHasMaster<T>) {
    return narrow<T>(value);
  } else {
    return value;
  }
}

// Whether a parameter is its rounded master; a NaN need not be.
bool is_rounded(Half param, float master) {
  return std::bit_cast<uint16_t>(param) == std::bit_cast<uint16_t>(static_cast<Half>(master));
}
bool is_rounded(BFloat16 param, float master) {
  return param.bits == rounded_to_upper_half(master) >> 16;
}

// Calls update(weight, gradient, i) for every element and stores the weight that it returns.
template <class P, class G, class Update>
inline void for_each_weight(const Operands& operands, int64_t begin, int64_t end, Update update) {
  P* __restrict param = static_cast<P*>(operands.param);
  const G* __restrict grad = static_cast<const G*>(operands.grad);
  if constexpr (kHasMaster<P>) {
    float* __restrict master = static_cast<float*>(operands.master);
#pragma GCC ivdep
    for (int64_t i = begin; i < end; ++i) {
      const float kept = master[i], seen = load(param[i]);
      const float weight = is_rounded(param[i], kept) ? kept : seen;
      const float updated = update(weight, load(grad[i]), i);
      master[i] = updated;
      param[i] = store<P>(updated);
    }
  } else {
#pragma GCC ivdep
    for (int64_t i = begin; i < end; ++i) param[i] = update(param[i], load(grad[i]), i);
  }
}

template <class V>
struct AdamWRule {
  V decay, beta1, rest1, beta2, rest2, eps, step_size, root_scale;

  explicit AdamWRule(const AdamWFactors& factors)
      : decay(factors.decay),
        beta1(factors.beta1),
        rest1(1 - factors.beta1),
        beta2(factors.beta2),
        rest2(1 - factors.beta2),
        eps(factors.eps),
        step_size(factors.step_size),
        root_scale(factors.root_scale) {}

  // Changes the moments, and returns the new weight.
  V operator()(V weight, V grad, V& mean, V& square) const {
    mean = mean * beta1 + rest1 * grad;
    square = square * beta2 + rest2 * grad * grad;
    return weight * decay - step_size * mean / (std::sqrt(square) * root_scale + eps);
  }
};

template <class P, class G>
void adamw(const Operands& operands, const AdamWFactors& factors, int64_t begin, int64_t end) {
  using V = Value<P>;
  V* __restrict exp_avg = static_cast<V*>(operands.first);
  V* __restrict exp_avg_sq = static_cast<V*>(operands.second);
  const AdamWRule<V> rule(factors);
  for_each_weight<P, G>(operands, begin, end, [=](V weight, V grad, int64_t i) {
    V mean = exp_avg[i], square = exp_avg_sq[i];
    const V updated = rule(weight, grad, mean, square);
    exp_avg[i] = mean;
    exp_avg_sq[i] = square;
    return updated;
  });
}

// In pieces whose words fit the first-level cache.
template <class P, class G>
void rounded_adamw(const Operands& operands, const AdamWFactors& factors, const MomentDraws& draws,
                   int64_t begin, int64_t end) {
  constexpr int64_t kPiece = 16 * kPhiloxGroup;
  BFloat16* __restrict exp_avg = static_cast<BFloat16*>(operands.first);
  BFloat16* __restrict exp_avg_sq = static_cast<BFloat16*>(operands.second);
  const AdamWRule<float> rule(factors);
  uint32_t words[kPiece];
  for (int64_t done = begin; done < end;) {
    const int64_t run_end = done + draws.length - done % draws.length;
    const int64_t next = std::min({end, run_end, done + kPiece});
    for_elements(draws.key, static_cast<uint64_t>(draws.place(done)), next - done, words,
                 SameWords{});
    const uint32_t* __restrict drawn = words;
    for_each_weight<P, G>(operands, done, next, [=](float weight, float grad, int64_t i) {
      float mean = widen(exp_avg[i]), square = widen(exp_avg_sq[i]);
      const float updated = rule(weight, grad, mean, square);
      exp_avg[i].bits = stochastic_bfloat16(mean, for_exp_avg(drawn[i - done]));
      exp_avg_sq[i].bits = stochastic_bfloat16(square, for_exp_avg_sq(drawn[i - done]));
      return updated;
    });
    done = next;
  }
}

template <class P, class G, SgdKind kKind>
void sgd(const Operands& operands, const SgdFactors& factors, int64_t begin, int64_t end) {
  using V = Value<P>;
  V* __restrict buffer = static_cast<V*>(operands.first);
  const V lr = factors.lr, weight_decay = factors.weight_decay;
  const V keep = factors.keep, add = factors.add, momentum = factors.momentum;
  for_each_weight<P, G>(operands, begin, end, [=](V weight, V grad, int64_t i) {
    V direction = grad + weight_decay * weight;
    if constexpr (kKind != SgdKind::plain) {
      const V kept = keep * buffer[i] + add * direction;
      buffer[i] = kept;
      direction = kKind == SgdKind::nesterov ? direction + momentum * kept : kept;
    }
    return weight - lr * direction;
  });
}

// Lanes are part of the result: element i is summed in lane i % kLanes of its block.
constexpr int64_t kLanes = 16;

template <class T>
double sum_squares(const void* data, int64_t begin, int64_t end) {
  const T* values = static_cast<const T*>(data) + begin;
  const int64_t count = end - begin, whole = count / kLanes * kLanes;
  double sums[kLanes] = {};
  for (int64_t i = 0; i < whole; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const double value = load(values[i + lane]);
      sums[lane] += value * value;
    }
  }
  for (int64_t i = whole; i < count; ++i) {
    const double value = load(values[i]);
    sums[i - whole] += value * value;
  }
  for (int64_t width = kLanes / 2; width > 0; width /= 2) {
    for (int64_t lane = 0; lane < width; ++lane) sums[lane] += sums[lane + width];
  }
  return sums[0];
}

template <class T>
FixedSum sum_squares_fixed(const void* data, const Grid& grid, int64_t begin, int64_t end) {
  const T* values = static_cast<const T*>(data);
  const double coarse = grid.coarse, fine = grid.fine;
  const auto bits = [](double value) { return std::bit_cast<uint64_t>(value); };
  // The bits of grid + square are those of the grid plus the number of steps: the grids are taken
  // off at the end, and what overflows on the way does not matter.
  uint64_t coarse_sum = 0, fine_sum = 0;
  for (int64_t i = begin; i < end; ++i) {
    const double value = load(values[i]);
    const double square = value * value;
    const double rounded = square + coarse;
    const double rest = square - (rounded - coarse);
    coarse_sum += bits(rounded);
    fine_sum += bits(rest + fine);
  }
  const auto count = static_cast<uint64_t>(end - begin);
  return {static_cast<int64_t>(coarse_sum - count * bits(coarse)),
          static_cast<int64_t>(fine_sum - count * bits(fine))};
}

// Without its sign a float orders like its bits, with infinity above all numbers and NaN above
// infinity.
template <class V>
using Bits = std::conditional_t<sizeof(V) == 8, uint64_t, uint32_t>;
template <class V>
Bits<V> magnitude(V value) {
  return std::bit_cast<Bits<V>>(value) & (~Bits<V>{0} >> 1);
}

template <class T>
double max_abs(const void* data, int64_t begin, int64_t end) {
  const T* values = static_cast<const T*>(data);
  Bits<Value<T>> largest = 0;
  for (int64_t i = begin; i < end; ++i) {
    const auto bits = magnitude(load(values[i]));
    largest = bits > largest ? bits : largest;
  }
  return std::bit_cast<Value<T>>(largest);
}

template <class T>
double scale(void* data, double factor, int64_t begin, int64_t end) {
  T* __restrict values = static_cast<T*>(data);
  const Value<T> by = factor;
  Bits<Value<T>> largest = 0;
  for (int64_t i = begin; i < end; ++i) {
    const T scaled = store<T>(load(values[i]) * by);
    values[i] = scaled;
    const auto bits = magnitude(load(scaled));
    largest = bits > largest ? bits : largest;
  }
  return std::bit_cast<Value<T>>(largest);
}

// find.template operator()<T>() for the type that `dtype` names.
template <class Kernel, class Find>
Kernel for_dtype(DType dtype, Find find) {
  switch (dtype) {
    case DType::float64:
      return find.template operator()<double>();
    case DType::float32:
      return find.template operator()<float>();
    case DType::float16:
      return find.template operator()<Half>();
    case DType::bfloat16:
      return find.template operator()<BFloat16>();
    default:
      return nullptr;
  }
}

template <class Kernel, class Find>
Kernel for_pair(DType param, DType grad, Find find) {
  return for_dtype<Kernel>(param, [&]<class P>() -> Kernel {
    if (grad == param) return find.template operator()<P, P>();
    if (kHasMaster<P> && grad == DType::float32) return find.template operator()<P, float>();
    return nullptr;
  });
}

AdamWKernel find_adamw(DType param, DType grad) {
  return for_pair<AdamWKernel>(param, grad, []<class P, class G>() { return adamw<P, G>; });
}

RoundedAdamWKernel find_rounded_adamw(DType param, DType grad) {
  return for_pair<RoundedAdamWKernel>(param, grad, []<class P, class G>() -> RoundedAdamWKernel {
    if constexpr (std::is_same_v<P, double>) {
      return nullptr;
    } else {
      return rounded_adamw<P, G>;
    }
  });
}

SgdKernel find_sgd(SgdKind kind, DType param, DType grad) {
  return for_pair<SgdKernel>(param, grad, [kind]<class P, class G>() -> SgdKernel {
    switch (kind) {
      case SgdKind::plain:
        return sgd<P, G, SgdKind::plain>;
      case SgdKind::momentum:
        return sgd<P, G, SgdKind::momentum>;
      case SgdKind::nesterov:
        return sgd<P, G, SgdKind::nesterov>;
    }
    return nullptr;
  });
}

NormKernel find_sum_squares(DType dtype) {
  return for_dtype<NormKernel>(dtype, []<class T>() { return sum_squares<T>; });
}
NormKernel find_max_abs(DType dtype) {
  return for_dtype<NormKernel>(dtype, []<class T>() { return max_abs<T>; });
}
FixedSumKernel find_sum_squares_fixed(DType dtype) {
  return for_dtype<FixedSumKernel>(dtype, []<class T>() { return sum_squares_fixed<T>; });
}
ScaleKernel find_scale(DType dtype) {
  return for_dtype<ScaleKernel>(dtype, []<class T>() { return scale<T>; });
}

}  // namespace

const Kernels kernels = {find_adamw,   find_rounded_adamw,     find_sgd,  find_sum_squares,
                         find_max_abs, find_sum_squares_fixed, find_scale};

}  // namespace lockstep::optim::detail::LOCKSTEP_ISA
