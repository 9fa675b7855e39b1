// SPDX-License-Identifier: Apache-2.0
// tile_attention.h by libtorch's flash attention, or by cuDNN's where libtorch would choose that.
// Private: not installed.
#pragma once

#include "lockstep/nn/context/tile_attention.h"

namespace lockstep::nn::flash_tiles {

// Whether libtorch has it (2.5 or later, on CUDA) for heads like these.
bool can_attend(const at::Tensor& q);
// Whether the tile is cuDNN's: of whole chunks, because plans are kept by shape.
bool takes_cudnn(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                 const AttentionTile& tile);
PartialAttention attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                        const AttentionTile& tile);
void add_gradients(const AttentionGradients& sums, const at::Tensor& q, const at::Tensor& k,
                   const at::Tensor& v, const AttentionResult& result, const AttentionTile& tile);

}  // namespace lockstep::nn::flash_tiles
