// SPDX-License-Identifier: Apache-2.0
// Activations, softmax and rotations on float32 in the CPU's memory, compiled once for each
// instruction set that matters (LOCKSTEP_ISA) and chosen at run time. With an exponential of our
// own: some builds of libtorch call the C library's for each element, which takes several times as
// long as the matrix products around it. The bits of an element depend neither on the instruction
// set nor on its place. Private: not installed.
#pragma once

#include <cstdint>

namespace lockstep::nn {

struct ActivationKernels {
  void (*gelu)(const float* x, float* out, int64_t count);
  void (*gelu_backward)(const float* x, const float* grad, float* grad_x, int64_t count);
  void (*swiglu)(const float* gate, const float* up, float* out, int64_t count);
  void (*swiglu_backward)(const float* gate, const float* up, const float* grad, float* grad_gate,
                          float* grad_up, int64_t count);
  // In place: softmax of scale * the first `valid` of a row of `length`; the others become 0.
  // Returns the natural logarithm of what was divided by: the log-sum-exp of the scaled values.
  float (*softmax)(float* row, int64_t valid, int64_t length, float scale);
  // In place: exp(scale * x - minus), which is the softmax above where `minus` is its log-sum-exp.
  void (*scaled_exponentials)(float* row, int64_t count, float scale, float minus);
  // In place: from the gradient of the probabilities to that of what they were made of.
  void (*softmax_backward)(const float* probabilities, float* grad, int64_t length, float scale);
  // The same where the mean of the gradient under the probabilities is known.
  void (*softmax_backward_with_mean)(const float* probabilities, float* grad, int64_t length,
                                     float scale, float mean);
  // Turns pairs (x[i], x[half + i]) by angles with these cosines, and with these sines times sign.
  void (*rotate)(const float* x, const float* cosine, const float* sine, float sign, float* out,
                 int64_t half);
};

namespace baseline {
extern const ActivationKernels kActivations;
}
namespace x86_v3 {  // AVX2, FMA
extern const ActivationKernels kActivations;
}

// The best that this processor can run.
const ActivationKernels& activation_kernels();

}  // namespace lockstep::nn
