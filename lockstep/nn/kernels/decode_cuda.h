// SPDX-License-Identifier: Apache-2.0
// What a CUDA device computes for the one new token of each text: decode_launch.h for tensors.
// Private: not installed.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "lockstep/nn/kernels/linear_map.h"

namespace lockstep::nn::cuda {

// On a device that this build has kernels for.
bool has_decode_kernels(const at::Tensor& tensor);

at::Tensor few_linear(const at::Tensor& input, const FusedLinear& linear);

struct AttentionHeads {
  int64_t heads = 1, kv_heads = 1;
  at::Tensor rotation = {};             // of all positions; undefined: none
  at::Tensor q_norm = {}, k_norm = {};  // weights of RMS norms of each head; undefined: none
  double epsilon = 0;
};
// One token of each row of a cache, in the device's memory.
struct NewTokens {
  at::Tensor positions;  // (rows) in their texts
  at::Tensor slots;      // (rows) where they are stored; -1: the row has no text
};
struct AttentionMemory {
  at::Tensor keys, values;                 // (rows, K, slots, D)
  at::Tensor scratch = {}, counters = {};  // made by the first call
};

// Whether there is a kernel for heads of this width.
bool can_attend(c10::Device device, int64_t heads, int64_t kv_heads, int64_t width);
// qkv is (1, rows, (H + 2 K) D). Stores k and v, and returns the attention of q to all that is
// stored, or to the last `window` of that where it is above 0: (1, rows, H * D).
at::Tensor attend_new(const at::Tensor& qkv, const AttentionHeads& heads, const NewTokens& tokens,
                      AttentionMemory& memory, int64_t window);

}  // namespace lockstep::nn::cuda
