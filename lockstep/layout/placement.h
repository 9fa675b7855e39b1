// SPDX-License-Identifier: Apache-2.0
// Which part of which tensor this rank holds. Every parameter, gradient, optimizer state and
// checkpoint slice has one.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/layout/box.h"

namespace lockstep::layout {

// Where the values of a parameter are that ranks share out.
enum class ParameterState {
  sharded,    // every rank has its shard, and no rank the whole
  gathering,  // the whole is on its way to this rank
  gathered,   // the whole is in this rank's memory
  resharding  // the whole is being dropped
};

// A value. Ranks that differ only on replicating axes hold the same slice; over the sharding axes
// the slices tile the tensor. Axes of the mesh that are named in neither list do not hold the
// tensor at all (another pipeline stage).
struct Placement {
  std::string name;  // the tensor's name in the whole model
  Shape global_shape;
  Box slice;  // in indices of the whole tensor
  std::vector<std::string> replicated_over = {};
  std::vector<std::string> sharded_over = {};

  static Placement whole(std::string name, Shape shape,
                         std::vector<std::string> replicated_over = {});

  // The part of this slice that begins and ends at `local` of its dimension `dim`, now sharded over
  // `axis` (and no longer replicated over it).
  Placement narrow(int64_t dim, Range local, const std::string& axis) const;

  int64_t numel() const { return slice.numel(); }
  bool is_whole() const { return slice == Box::whole(global_shape); }
  bool is_empty() const { return slice.empty(); }
  // Shape of the tensor that holds the slice; (0) where nothing of a 0-d tensor is held.
  Shape local_shape() const;

  // Throws ConfigError unless there is a name, sizes are not negative, the slice lies in the tensor
  // and each axis is named once.
  void validate() const;
  // "layer.weight (8, 4) [0:4, 0:4] sharded over tp, replicated over dp"
  std::string describe() const;

  bool operator==(const Placement&) const = default;
};

}  // namespace lockstep::layout
