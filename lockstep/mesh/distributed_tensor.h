// SPDX-License-Identifier: Apache-2.0
// A tensor cut along one dimension, each rank of a group holding its part.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/group.h"
#include "lockstep/comm/work.h"
#include "lockstep/layout/box.h"
#include "lockstep/layout/placement.h"

namespace lockstep::mesh {

// Indices start to end of dimension `dim` are with `rank`, one of `partitions`.
struct Partition {
  int64_t dim = 0, start = 0, end = 0;
  int partitions = 1, rank = 0;

  bool operator==(const Partition&) const = default;
};

// What can be done with a tensor that is cut.
enum class TensorOp {
  elementwise,   // with numbers, or with tensors that are cut in the same way
  reduce,        // what combines elements along a dimension, or all: sums, softmax, norms, sorting
  matmul_left,   // this tensor times a matrix that every rank has
  matmul_right,  // a matrix that every rank has times this tensor
  all_gather,
  redistribute,  // to be cut along another dimension
};

// A handle, as tensors are: copies share the shard. The parts are ceiling chunks (10 over 4 ranks
// is 3, 3, 3, 1), so a late rank's shard may be empty. Dimensions count from the end where
// negative; one outside the tensor is a ConfigError. Operations are not recorded by autograd. Those
// that return a Work run in place on the shard; the others block.
class DistributedTensor {
 public:
  // Takes this rank's shard as it is. Its sizes must be those that the global shape and the rank
  // give.
  DistributedTensor(const at::Tensor& shard, layout::Shape global_shape, int64_t dim,
                    comm::Group group);

  // Copies this rank's part out of a tensor that every rank has. Needs no communication.
  static DistributedTensor partition(const at::Tensor& whole, int64_t dim, comm::Group group);
  // Reduces the ranks' contributions, each of the whole shape, and leaves every rank its part of
  // the result.
  static DistributedTensor reduce_scatter(const at::Tensor& contribution, int64_t dim,
                                          comm::Group group,
                                          const comm::ReduceOptions& options = {});

  // The shape of this rank's part of a tensor that is cut so.
  static layout::Shape local_shape(layout::Shape global_shape, int64_t dim,
                                   const comm::Group& group);

  const at::Tensor& local() const { return local_; }
  layout::Shape local_shape() const;
  const layout::Shape& global_shape() const { return global_shape_; }
  const Partition& partition() const { return partition_; }
  const comm::Group& group() const { return group_; }
  at::Device device() const { return local_.device(); }
  // Whether the result cannot be had from each rank's own shard. False: computed on the shards, it
  // is the shards of the result, cut along the same dimension. `dim` is that of reduce (none: all)
  // and of redistribute. On a group of one nothing needs communication.
  bool requires_communication(TensorOp op, std::optional<int64_t> dim = std::nullopt) const;
  // Where the shard belongs, if the group is that of mesh axis `axis`.
  layout::Placement placement(std::string name, const std::string& axis) const;

  // The whole tensor, on every rank.
  at::Tensor all_gather(const comm::CollectiveOptions& options = {}) const;
  // The same tensor cut along another dimension. Each rank sends and receives about one shard,
  // never the whole.
  DistributedTensor redistribute(int64_t dim, const comm::CollectiveOptions& options = {}) const;

  // Between ranks that hold the same part: replicas, or neighbouring stages.
  comm::Work all_reduce(const comm::Group& replicas, comm::ReduceOptions options = {}) const;
  comm::Work broadcast(const comm::Group& replicas, comm::RootedOptions options = {}) const;
  comm::Work send(int to, const comm::Group& peers, comm::CollectiveOptions options = {}) const;
  comm::Work recv(int from, const comm::Group& peers, comm::CollectiveOptions options = {}) const;

 private:
  at::Tensor local_;
  layout::Shape global_shape_;
  Partition partition_;
  comm::Group group_;
};

}  // namespace lockstep::mesh
