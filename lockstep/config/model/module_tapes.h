// SPDX-License-Identifier: Apache-2.0
// The layers of a language model as a tape has them: one function for each kind of module, with
// what it saves. Follows model/ and nn/. Private: not installed.
#pragma once

#include <cstdint>

#include "lockstep/config/model/activation_tape.h"
#include "lockstep/layout/parallel_config.h"

namespace lockstep::config {

// Which of several ways the operators go.
struct Kernels {
  bool cuda = false;             // with the kernels of nn/kernels/fused_kernels.cu
  bool fused_attention = false;  // libtorch's, from 2.0 on; else nn::blockwise_causal_attention
  bool mean_saves = false;       // its input, as before 2.0; it has only to know the size
};

// Products of a block in 8 bits.
struct Float8Products {
  bool qkv = false, out = false, up = false, down = false;
};

// What a micro-batch is on one rank: with tensor parallelism the shares of one rank.
struct LayerSizes {
  int64_t batch, length;           // B, T
  int64_t hidden;                  // C
  int64_t heads, kv_heads, width;  // H, K, D
  int64_t ffn, vocab, positions;   // F, V, P
  int64_t element;                 // bytes
  int64_t stream_shares;           // ranks that share the sequence between matrices
  int64_t window;                  // of attention; 0: none
  int64_t tile;                    // tokens of a row that MLP and head compute at once; 0: all
  bool llama, qkv_bias, qk_norm, tensor_parallel;
  double dropout;
  layout::Recompute recompute;
  bool on_disk;  // what layers keep for backward: inputs of recomputed blocks, or all that is saved
  Kernels kernels;
  Float8Products float8 = {};

  bool windowed() const { return window > 0 && window < length; }
  bool has_tiles() const { return tile > 0 && tile < length / stream_shares; }
  bool stores_all() const { return on_disk && recompute == layout::Recompute::none; }
  int64_t tokens() const { return batch * length; }
  int64_t stream() const { return tokens() / stream_shares * hidden * element; }  // (B, T, C)
  int64_t whole_stream() const { return tokens() * hidden * element; }
  int64_t queries() const { return tokens() * heads * width * element; }
  int64_t keys() const { return tokens() * kv_heads * width * element; }
  int64_t qkv() const { return queries() + 2 * keys(); }
};

// Tokens -> (B, T, C).
Buffer embedding(Tape& tape, const LayerSizes& sizes);
// (B, T, C) -> (B, T, C).
Buffer block(Tape& tape, const LayerSizes& sizes, const Buffer& x);
// (B, T, C) -> the loss.
Buffer head(Tape& tape, const LayerSizes& sizes, const Buffer& x);

}  // namespace lockstep::config
