// SPDX-License-Identifier: Apache-2.0
// What fused_kernels.cu offers: launches on raw memory, without torch. Private: not installed.
#pragma once

#include <cstdint>

#include "lockstep/core/dtype.h"

namespace lockstep::nn::cuda {

// Heads in memory: element (b, t, head, i) of a tensor is at b * batch + t * position + head * head
// + i.
struct HeadStrides {
  int64_t batch, position, head;
};

struct HeadShape {
  int64_t batch, length, width;  // B, T, D
};

// Heads next to each other, in the order of the result.
struct HeadPart {
  const void* memory = nullptr;
  HeadStrides strides = {};
  int64_t heads = 0;
  bool turned = false;
};

// Copies the heads of all parts to one layout. Those that are turned turn by the angles, or back by
// them where `sign` is -1. The table is (2, positions, D / 2).
// Where `amax` is not null, it becomes at least the largest magnitude that is written.
struct TurnOptions {
  HeadShape shape;
  HeadPart parts[3];
  HeadStrides to;
  const float* table;
  int64_t table_positions;
  float sign;
  float* amax = nullptr;
};
void launch_turn(const TurnOptions& options, DType dtype, void* out, void* stream);

// Rows of gate, up (2 * width) and of outputs (width). `amax` as above.
void launch_swiglu(int64_t rows, int64_t width, DType dtype, const void* gate_up, void* out,
                   float* amax, void* stream);
void launch_swiglu_backward(int64_t rows, int64_t width, DType dtype, const void* gate_up,
                            const void* grad, void* grad_gate_up, float* amax, void* stream);

struct CrossEntropyShape {
  int64_t rows, classes;
  int64_t ignored;  // the target of rows that do not count
};
void launch_cross_entropy(const CrossEntropyShape& shape, DType dtype, const void* logits,
                          const int64_t* targets, float scale, void* gradient, float* losses,
                          void* stream);
void launch_scale_unless_one(int64_t count, DType dtype, void* data, const float* factor,
                             void* stream);

}  // namespace lockstep::nn::cuda
