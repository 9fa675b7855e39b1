// SPDX-License-Identifier: Apache-2.0
// The loops over elements, compiled once for each instruction set that matters (LOCKSTEP_ISA) and
// chosen at run time. Every operation is rounded by itself, none is fused or reordered: the bits of
// a result depend neither on the instruction set nor on where in memory or in a block an element
// lies.
#pragma once

#include <cstdint>
#include <span>

#include "lockstep/core/dtype.h"
#include "lockstep/optim/kernels/stochastic_rounding.h"

namespace lockstep::optim {

// What one step of AdamW multiplies and adds; the same for all elements of a parameter.
struct AdamWFactors {
  double decay;  // 1 - lr * weight decay
  double beta1;
  double beta2;
  double eps;
  double step_size;        // lr / (1 - beta1^step)
  double root_scale;       // 1 / sqrt(1 - beta2^step)
  double grad_factor = 1;  // of gradients, in kernels of CUDA memory

  bool operator==(const AdamWFactors&) const = default;
};

namespace detail {

// The memory of one parameter in one step. A parameter of 16 bits has a float32 master, which is
// what is updated; the parameter is its rounded copy. Where the two no longer agree someone has
// written to the parameter, and the parameter wins. `first` and `second` are the optimizer's state.
struct Operands {
  void* param;
  const void* grad;
  void* master;
  void* first;
  void* second;
};

struct SgdFactors {
  double lr;
  double weight_decay;
  double keep;             // of the momentum
  double add;              // of the gradient to the momentum
  double momentum;         // Nesterov's look ahead
  double grad_factor = 1;  // as above

  bool operator==(const SgdFactors&) const = default;
};
enum class SgdKind { plain, momentum, nesterov };

// Steps that squares are rounded to, each given by a number whose last bit is worth one step: 1.5
// times a power of two, so that what is added to it may have either sign.
struct Grid {
  double coarse;
  double fine;
};
// In steps of the grid.
struct FixedSum {
  int64_t coarse;
  int64_t fine;
};

// All work on elements [begin, end).
using AdamWKernel = void (*)(const Operands&, const AdamWFactors&, int64_t begin, int64_t end);
// Moments are in bfloat16, and rounded by these random numbers.
using RoundedAdamWKernel = void (*)(const Operands&, const AdamWFactors&, const MomentDraws&,
                                    int64_t begin, int64_t end);
using SgdKernel = void (*)(const Operands&, const SgdFactors&, int64_t begin, int64_t end);
using NormKernel = double (*)(const void* data, int64_t begin, int64_t end);
// Rounds every square to coarse steps and what is left of it to fine ones, and adds up whole
// numbers: exact in any order. Squares are below 2^48 coarse steps, and elements at most 2^14.
using FixedSumKernel = FixedSum (*)(const void* data, const Grid& grid, int64_t begin, int64_t end);
// Multiplies, and returns the largest magnitude of the result.
using ScaleKernel = double (*)(void* data, double factor, int64_t begin, int64_t end);

// Null for types that have no kernel. A gradient has the parameter's type, or float32 where the
// parameter has 16 bits.
struct Kernels {
  AdamWKernel (*adamw)(DType param, DType grad);
  RoundedAdamWKernel (*rounded_adamw)(DType param, DType grad);  // not for float64
  SgdKernel (*sgd)(SgdKind kind, DType param, DType grad);
  NormKernel (*sum_squares)(DType);
  NormKernel (*max_abs)(DType);  // a NaN anywhere is the result
  FixedSumKernel (*sum_squares_fixed)(DType);
  ScaleKernel (*scale)(DType);
};

namespace baseline {
extern const Kernels kernels;
}
namespace x86_v3 {  // AVX2, F16C
extern const Kernels kernels;
}

// The best that this processor can run.
const Kernels& kernels();

// update_kernel.cu: the elements of each part, in CUDA memory, many parts with one kernel, queued
// on the stream.
namespace cuda {
struct UpdatePart {
  Operands operands;
  int64_t count;  // of elements
};
struct RoundedUpdatePart : UpdatePart {  // moments are in bfloat16
  MomentDraws draws;
};
void launch_adamw(std::span<const UpdatePart> parts, const AdamWFactors& factors, DType param,
                  DType grad, void* stream);
void launch_adamw(std::span<const RoundedUpdatePart> parts, const AdamWFactors& factors,
                  DType param, DType grad, void* stream);
void launch_sgd(std::span<const UpdatePart> parts, SgdKind kind, const SgdFactors& factors,
                DType param, DType grad, void* stream);
}  // namespace cuda

}  // namespace detail
}  // namespace lockstep::optim
