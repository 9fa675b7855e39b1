// SPDX-License-Identifier: Apache-2.0
// Parts of a training step for `lockstep bench machine` to time: each function makes what they need
// and returns what is to be repeated.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>

#include "lockstep/comm/group.h"

namespace lockstep::cli {

struct WorkSizes {
  int64_t hidden, vocab, batch, length;
};

// Forward and backward of blocks, each shared by the group if there is one.
std::function<void()> block_work(const WorkSizes& sizes, const at::TensorOptions& tensors,
                                 size_t blocks, const comm::Group* sharing);
// Of the head and the loss, as the trainer computes them.
std::function<void()> head_work(const WorkSizes& sizes, const at::TensorOptions& tensors);
// Of a block's norms and of what goes around its products, without the products: what ranks that
// share a block compute again.
std::function<void()> stream_work(const WorkSizes& sizes, const at::TensorOptions& tensors);
std::function<void()> attention_work(const WorkSizes& sizes, const at::TensorOptions& tensors,
                                     int64_t heads);

}  // namespace lockstep::cli
