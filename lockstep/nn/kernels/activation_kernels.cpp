// SPDX-License-Identifier: Apache-2.0
#include "lockstep/nn/kernels/activation_kernels.h"

#include <bit>
#include <cmath>
#include <limits>

#ifndef LOCKSTEP_ISA
#define LOCKSTEP_ISA baseline
#endif

namespace lockstep::nn::LOCKSTEP_ISA {
namespace {

// Selects by bits. Compilers turn conditional expressions into branches and compute what follows
// for each of the constants below; a product with that of -87 is subnormal, and a subnormal number
// costs an x86 processor a hundred cycles, even where it is not selected.
inline float select(bool condition, float yes, float no) {
  const uint32_t mask = condition ? ~uint32_t{0} : 0;
  return std::bit_cast<float>((std::bit_cast<uint32_t>(yes) & mask) |
                              (std::bit_cast<uint32_t>(no) & ~mask));
}

// x = n ln 2 + r with |r| <= ln 2 / 2: 2^n by its bits, e^r by a polynomial. Within 2 units in the
// last place where the result is a normal number; below that it stays at the smallest.
inline float exponential(float x) {
  constexpr float kLog2E = 1.44269504F, kLn2High = 0.693359375F, kLn2Low = -2.12194440e-4F;
  constexpr float kRounder = 12582912.0F;  // 1.5 * 2^23: adding it leaves no fraction
  x = select(x < -87.0F, -87.0F, x);
  x = select(x > 88.0F, 88.0F, x);
  const float n = (x * kLog2E + kRounder) - kRounder;
  const float r = (x - n * kLn2High) - n * kLn2Low;
  float y = 1.9875691500e-4F;
  y = y * r + 1.3981999507e-3F;
  y = y * r + 8.3334519073e-3F;
  y = y * r + 4.1665795894e-2F;
  y = y * r + 1.6666665459e-1F;
  y = y * r + 5.0000001201e-1F;
  y = y * (r * r) + r + 1.0F;
  const auto bits = static_cast<uint32_t>(static_cast<int32_t>(n) + 127) << 23;
  return y * std::bit_cast<float>(bits);
}

inline float sigmoid(float x) { return 1.0F / (1.0F + exponential(-x)); }

// The tanh form: x / 2 (1 + tanh(a (x + b x^3))) is x sigmoid(2 a (x + b x^3)).
constexpr float kTwoA = 1.5957691216F;  // 2 sqrt(2 / pi)
constexpr float kB = 0.044715F;

void gelu(const float* __restrict x, float* __restrict out, int64_t count) {
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) {
    const float v = x[i];
    out[i] = v * sigmoid(kTwoA * (v + kB * v * v * v));
  }
}

void gelu_backward(const float* __restrict x, const float* __restrict grad,
                   float* __restrict grad_x, int64_t count) {
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) {
    const float v = x[i], s = sigmoid(kTwoA * (v + kB * v * v * v));
    const float slope = kTwoA * (1.0F + 3.0F * kB * v * v);
    grad_x[i] = grad[i] * (s + v * s * (1.0F - s) * slope);
  }
}

void swiglu(const float* __restrict gate, const float* __restrict up, float* __restrict out,
            int64_t count) {
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) out[i] = gate[i] * sigmoid(gate[i]) * up[i];
}

void swiglu_backward(const float* __restrict gate, const float* __restrict up,
                     const float* __restrict grad, float* __restrict grad_gate,
                     float* __restrict grad_up, int64_t count) {
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) {
    const float g = gate[i], s = sigmoid(g);
    grad_up[i] = grad[i] * (g * s);
    grad_gate[i] = grad[i] * up[i] * (s * (1.0F + g * (1.0F - s)));
  }
}

// Sums and maxima in lanes, which vector instructions can keep; combined in a fixed order.
constexpr int64_t kLanes = 16;

template <class Combine, class Value>
float over_lanes(int64_t count, float start, Combine combine, Value value) {
  float lanes[kLanes];
  for (float& lane : lanes) lane = start;
  const int64_t whole = count / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      lanes[lane] = combine(lanes[lane], value(i + lane));
    }
  }
  for (int64_t i = whole; i < count; ++i) lanes[i - whole] = combine(lanes[i - whole], value(i));
  for (int64_t width = kLanes / 2; width > 0; width /= 2) {
    for (int64_t lane = 0; lane < width; ++lane) {
      lanes[lane] = combine(lanes[lane], lanes[lane + width]);
    }
  }
  return lanes[0];
}

inline float larger(float a, float b) { return a > b ? a : b; }
inline float sum(float a, float b) { return a + b; }

float softmax(float* row, int64_t valid, int64_t length, float scale) {
  const float largest = scale * over_lanes(valid, -std::numeric_limits<float>::infinity(), larger,
                                           [row](int64_t i) { return row[i]; });
#pragma GCC ivdep
  for (int64_t i = 0; i < valid; ++i) row[i] = exponential(scale * row[i] - largest);
  const float total = over_lanes(valid, 0.0F, sum, [row](int64_t i) { return row[i]; });
  const float factor = 1.0F / total;
  for (int64_t i = 0; i < valid; ++i) row[i] *= factor;
  for (int64_t i = valid; i < length; ++i) row[i] = 0;
  return largest + std::log(total);
}

void scaled_exponentials(float* row, int64_t count, float scale, float minus) {
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) row[i] = exponential(scale * row[i] - minus);
}

void softmax_backward_with_mean(const float* __restrict probabilities, float* __restrict grad,
                                int64_t length, float scale, float mean) {
#pragma GCC ivdep
  for (int64_t i = 0; i < length; ++i) {
    grad[i] = scale * probabilities[i] * (grad[i] - mean);
  }
}

void softmax_backward(const float* __restrict probabilities, float* __restrict grad, int64_t length,
                      float scale) {
  const float mean =
      over_lanes(length, 0.0F, sum, [=](int64_t i) { return probabilities[i] * grad[i]; });
  softmax_backward_with_mean(probabilities, grad, length, scale, mean);
}

void rotate(const float* __restrict x, const float* __restrict cosine, const float* __restrict sine,
            float sign, float* __restrict out, int64_t half) {
#pragma GCC ivdep
  for (int64_t i = 0; i < half; ++i) {
    const float a = x[i], b = x[half + i], s = sign * sine[i];
    out[i] = a * cosine[i] - b * s;
    out[half + i] = b * cosine[i] + a * s;
  }
}

}  // namespace

extern const ActivationKernels kActivations = {
    .gelu = gelu,
    .gelu_backward = gelu_backward,
    .swiglu = swiglu,
    .swiglu_backward = swiglu_backward,
    .softmax = softmax,
    .scaled_exponentials = scaled_exponentials,
    .softmax_backward = softmax_backward,
    .softmax_backward_with_mean = softmax_backward_with_mean,
    .rotate = rotate};

}  // namespace lockstep::nn::LOCKSTEP_ISA
