// SPDX-License-Identifier: Apache-2.0
// What few_linear.cu and decode_attention.cu offer: launches on raw memory, without torch, for the
// one new token of each text. Private: not installed.
#pragma once

#include <cstdint>

#include "lockstep/core/dtype.h"

namespace lockstep::nn::cuda {

enum class Activation { none, gelu, swiglu };

// result = activation(norm(x) weight^T + bias) + residual. What is null is left out. Each element
// of the matrix is read once.
struct FewLinear {
  int64_t vectors = 0, in = 0, out = 0;  // x is (vectors, in), the result (vectors, out)
  const void* x = nullptr;
  const void* weight = nullptr;  // (out, in); swiglu: (2 out, in), gates first
  const void* bias = nullptr;
  const void* norm_weight = nullptr;  // (in)
  const void* norm_bias = nullptr;    // null: the norm is of the root mean square
  const void* residual = nullptr;     // as the result
  void* result = nullptr;
  float epsilon = 0;  // of the norm
  Activation activation = Activation::none;
};
inline constexpr int64_t kMostCudaVectors = 8;
// The kernel wants whole packs of 16 bytes, and room for the vectors in a block's memory.
bool can_launch(const FewLinear& linear, DType dtype);
void launch_few_linear(const FewLinear& linear, DType dtype, void* stream);

// The new tokens' q and k are normed and rotated, k and v stored, and the attention of q to all
// that is stored computed. What is null is left out.
struct DecodeAttention {
  int64_t rows = 0, heads = 0, kv_heads = 0, width = 0;
  int64_t capacity = 0;       // slots of a row
  int64_t window = 0;         // tokens that are seen; 0: all
  const void* qkv = nullptr;  // (rows, (heads + 2 kv_heads) width)
  const void* q_norm = nullptr;
  const void* k_norm = nullptr;  // (width)
  float epsilon = 0;
  const float* table = nullptr;  // cosines and sines, (2, table_positions, width / 2)
  int64_t table_positions = 0;
  const int64_t* positions = nullptr;  // of each row's token in its text
  // Where it is stored, after all that are seen; -1: the row has no text.
  const int64_t* slots = nullptr;
  void* keys = nullptr;
  void* values = nullptr;  // (rows, kv_heads, capacity, width)
  void* result = nullptr;  // (rows, heads, width)
  // What blocks that share a row leave for the last of them: attention_scratch() numbers, and a
  // counter for each row and head of k, which is 0 before and after.
  float* scratch = nullptr;
  unsigned* counters = nullptr;
};
bool can_launch(const DecodeAttention& attention);
int64_t attention_scratch(const DecodeAttention& attention);
void launch_decode_attention(const DecodeAttention& attention, DType dtype, void* stream);

}  // namespace lockstep::nn::cuda
