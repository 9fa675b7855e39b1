// SPDX-License-Identifier: Apache-2.0
// The tensors of a model, which rank owns which of them, and which part of each this rank holds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
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

// Which part of a tensor this rank holds: every parameter, gradient, optimizer state and checkpoint
// slice has one. A value. Ranks that differ only on replicating axes hold the same slice; over the
// sharding axes the slices tile the tensor. Axes of the mesh that are named in neither list do not
// hold the tensor at all (another pipeline stage).
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

// Which rank owns which of a list of partitions, such as the parameters of a model: partition i
// belongs to rank i % world. A value; throws ConfigError, with both numbers, for what is outside.
class PartitionMap {
 public:
  PartitionMap(int64_t partitions, int world);

  int64_t partitions() const { return partitions_; }
  int world() const { return world_; }

  int owner(int64_t partition) const;
  bool owns(int rank, int64_t partition) const;
  // The place of a partition among those of its owner, and back.
  int64_t local_index(int64_t partition) const;
  int64_t global_index(int rank, int64_t local) const;

  int64_t owned_count(int rank) const;
  std::vector<int64_t> owned(int rank) const;  // ascending

  // The communication group of a set of partitions: the ranks that own some of them, ascending.
  std::vector<int> group_of(std::span<const int64_t> partitions) const;

 private:
  void check_rank(int rank) const;
  void check_partition(int64_t partition) const;

  int64_t partitions_;
  int world_;
};

// Numbers of elements of some tensors. The median of an even number of tensors is the mean of the
// two in the middle.
struct ParameterStatistics {
  int64_t count = 0, elements = 0;
  double mean = 0, median = 0;
  int64_t min = 0, max = 0;
  int64_t bytes = 0;

  // "3 tensors, 344 elements (mean 114.7, median 80, min 8, max 256), 1.34 kB"
  std::string describe() const;

  bool operator==(const ParameterStatistics&) const = default;
};

// The parameters of a model by name, in the order in which they were added. A value.
// optim::model_parameters() makes one of a module.
class ModelParameters {
 public:
  struct Parameter {
    std::string name;
    Shape shape;
    int64_t element_bytes = 4;

    int64_t elements() const { return numel_of(shape); }
    int64_t bytes() const { return elements() * element_bytes; }
    bool operator==(const Parameter&) const = default;
  };

  // ConfigError for an empty name or one that is there already, for a negative size and for
  // element_bytes below 1.
  ModelParameters& add(std::string name, Shape shape, int64_t element_bytes);

  // All of them, in order: index i is partition i of PartitionMap(size(), world).
  const std::vector<Parameter>& all() const { return parameters_; }
  size_t size() const { return parameters_.size(); }
  bool has(std::string_view name) const { return places_.contains(name); }
  // ConfigError for a name that is not there.
  const Parameter& at(std::string_view name) const;
  size_t index(std::string_view name) const;
  const Shape& shape(std::string_view name) const { return at(name).shape; }
  int64_t elements(std::string_view name) const { return at(name).elements(); }
  int64_t bytes(std::string_view name) const { return at(name).bytes(); }

  ParameterStatistics statistics() const;
  std::string describe() const { return statistics().describe(); }

  bool operator==(const ModelParameters& other) const { return parameters_ == other.parameters_; }

 private:
  std::vector<Parameter> parameters_;
  std::map<std::string, size_t, std::less<>> places_;
};

}  // namespace lockstep::layout
