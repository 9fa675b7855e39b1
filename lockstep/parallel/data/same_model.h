// SPDX-License-Identifier: Apache-2.0
// All ranks of a data-parallel group must have the same parameters and buffers.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/group.h"

namespace lockstep::parallel::detail {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

// Throws the same ConfigError on all ranks if number, order, names, shapes, dtypes or
// requires_grad differ; it names the operation, the first tensor that does, and the ranks.
// Collective.
void check_same_model(const char* operation, const NamedTensors& tensors, const comm::Group& group);

// The same where elements are not in the same order in memory: gradients are averaged as they lie
// there (bucket.h).
void check_same_strides(const char* operation, const NamedTensors& parameters,
                        const comm::Group& group);

// Gives all ranks `root`'s values; small tensors travel together. Collective.
void broadcast_tensors(const NamedTensors& tensors, const comm::Group& group, int root);

// Ranks that are threads cannot share a GPU: backward on one runs on one thread per device and
// process, which cannot wait for itself. Collective; ConfigError on all ranks.
void check_own_devices(const char* operation, const NamedTensors& parameters,
                       const comm::Group& group);
void check_own_devices(const char* operation, c10::Device device, const comm::Group& group);
// The bucket size that the ranks give; none: this rank takes the others'. Collective; ConfigError
// on all ranks where sizes differ, or are 0.
size_t agree_on_bucket_size(std::optional<size_t> bytes, const comm::Group& group);
// Bits depend on the number of threads that compute. Collective; ConfigError on all ranks.
void check_same_threads(const char* operation, const comm::Group& group);

}  // namespace lockstep::parallel::detail
