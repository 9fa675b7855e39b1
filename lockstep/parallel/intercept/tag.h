// SPDX-License-Identifier: Apache-2.0
// What the storage of a sharded model says about itself. Operators are handed tensors; by the tag
// in a tensor's storage they are found to be parameters, shards or gradients of an engine. Private:
// not installed.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>

#include <memory>
#include <string>
#include <vector>

#include "lockstep/parallel/intercept/dispatch.h"

namespace lockstep::parallel::detail {

class ShardEngine;
struct LeftShard;

// The key that all tensors with a tag carry, so that operators on them can be intercepted.
constexpr auto kShardKey = kDispatchKey;

// Where the parameters of a flat begin, by name: enough to name one after the engine has gone.
struct FlatNames {
  std::vector<std::string> names;
  std::vector<int64_t> bytes;  // where each begins in the storage

  const std::string& at(int64_t byte) const;
};

struct Tag {
  enum class Kind {
    parameter,  // whole parameters, there only while they are gathered
    shard,      // what the optimizer updates
    gradient,   // stands for a whole gradient that has gone into the shards
    packed,     // a shard's gradient, in memory only while it is used
    unreduced   // stands for a shard's gradient while there are only those of each rank
  };
  Kind kind = Kind::parameter;
  std::weak_ptr<ShardEngine> engine = {};
  size_t flat = 0;  // place in the engine
  std::shared_ptr<const FlatNames> names = nullptr;
  std::shared_ptr<void> memory = nullptr;           // kept as long as the storage points to it
  std::shared_ptr<const LeftShard> left = nullptr;  // of a parameter whose engine has gone

  // Of the parameter that a view with this tag shows.
  const std::string& name_of(const at::Tensor& view) const;
};

// Null for the tensors of others.
const Tag* find_tag(const at::Tensor& tensor);

// A storage at `data` with a tag. It cannot be resized.
c10::Storage make_storage(void* data, size_t bytes, c10::Device device, Tag tag);
// Lets a storage point elsewhere. Only the thread that computes may call this.
void repoint(const c10::Storage& storage, void* data, c10::Device device, Tag tag);

// A tensor over a tagged storage, with the key, contiguous, at `offset` elements.
at::Tensor tagged_tensor(const c10::Storage& storage, at::ScalarType dtype, at::IntArrayRef sizes,
                         int64_t offset);

}  // namespace lockstep::parallel::detail
