// SPDX-License-Identifier: Apache-2.0
// The loops that draw, over plain memory. Nothing of torch here: nvcc compiles this too.
#pragma once

#include <cstdint>

#include "lockstep/core/dtype.h"
#include "lockstep/core/philox.h"
#include "lockstep/nn/random/random.h"

namespace lockstep::nn {

// Memory filled in order holds `count` runs, each of `length` elements that are neighbours in the
// whole tensor.
struct Runs {
  static constexpr int kMaxDims = 8;

  int64_t length = 0, count = 1;
  int64_t first = 0;  // place of the first run's first element
  int num_dims = 0;   // over which the runs lie, the innermost first
  int64_t sizes[kMaxDims] = {}, strides[kMaxDims] = {};

  LOCKSTEP_HOST_DEVICE int64_t begin(int64_t run) const {
    int64_t place = first;
    for (int dim = 0; dim < num_dims; ++dim) {
      place += run % sizes[dim] * strides[dim];
      run /= sizes[dim];
    }
    return place;
  }
  int64_t numel() const { return length * count; }
};

// Elements whose word is below `threshold` become 0, the others `scale` times what they were.
struct Drop {
  uint32_t threshold = 0;
  double scale = 1;
};

// Uniform or normal numbers to those of a distribution, before it is truncated.
LOCKSTEP_HOST_DEVICE Lanes<float> transform(Lanes<float> x, const Distribution& distribution) {
  const float scale = distribution.scale, offset = distribution.offset;
  return {{fused(x.lane[0], scale, offset), fused(x.lane[1], scale, offset),
           fused(x.lane[2], scale, offset), fused(x.lane[3], scale, offset)}};
}

// What replaces `value` of element `index` where it is outside: it is drawn again under another
// key.
LOCKSTEP_HOST_DEVICE float inside(float value, RandomKey key, uint64_t index,
                                  const Distribution& distribution) {
  while (!(value >= distribution.low && value <= distribution.high)) {
    key.tensor += 0x9E3779B97F4A7C15;
    value = fused(normal(key, index), distribution.scale, distribution.offset);
  }
  return value;
}

// On the CPU, for elements `index` to `index + count` of the whole tensor. Compiled once for each
// instruction set that matters (LOCKSTEP_ISA) and chosen at run time.
struct CpuKernels {
  void (*draw)(const RandomKey& key, uint64_t index, int64_t count,
               const Distribution& distribution, float* out);
  // May work in place.
  void (*drop_float)(const RandomKey& key, uint64_t index, int64_t count, const Drop& drop,
                     const float* in, float* out);
  void (*drop_double)(const RandomKey& key, uint64_t index, int64_t count, const Drop& drop,
                      const double* in, double* out);
};
namespace baseline {
extern const CpuKernels kKernels;
}
namespace x86_v3 {  // AVX2, FMA
extern const CpuKernels kKernels;
}

// On the GPU, on contiguous memory, in the order of `stream`. Throw Error where CUDA reports one.
namespace cuda {
void launch_fill(const RandomKey& key, const Distribution& distribution, const Runs& runs,
                 DType dtype, void* out, void* stream);
void launch_drop(const RandomKey& key, const Drop& drop, const Runs& runs, DType dtype,
                 const void* in, void* out, void* stream);
}  // namespace cuda

}  // namespace lockstep::nn
