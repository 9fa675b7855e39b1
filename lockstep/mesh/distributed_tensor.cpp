// SPDX-License-Identifier: Apache-2.0
#include "lockstep/mesh/distributed_tensor.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/layout/shard_math.h"

namespace lockstep::mesh {
namespace {

using layout::Range;
using layout::Shape;

int64_t wrap_dim(const char* operation, int64_t dim, const Shape& shape, const comm::Group& group) {
  const auto dims = static_cast<int64_t>(shape.size());
  if (dims == 0) {
    throw ConfigError(format("[{}] rank {}: a 0-d tensor has no dim {} to be split along",
                             operation, group.rank(), dim));
  }
  if (dim < -dims || dim >= dims) {
    throw ConfigError(
        format("[{}] rank {}: split dim {} of shape {}, must be at least {} and below {}",
               operation, group.rank(), dim, layout::describe(shape), -dims, dims));
  }
  return dim < 0 ? dim + dims : dim;
}

Partition partition_of(const Shape& shape, int64_t dim, const comm::Group& group) {
  const auto range = layout::ceiling_chunk(shape[dim], group.size(), group.rank());
  return {dim, range.begin, range.end, group.size(), group.rank()};
}

Shape with_size(Shape shape, int64_t dim, int64_t size) {
  shape[dim] = size;
  return shape;
}

// The split dimension first: then every rank's part is one block of memory, and the blocks lie in
// rank order.
at::Tensor pack(const at::Tensor& tensor, int64_t dim) {
  return tensor.detach().movedim(dim, 0).contiguous();
}

at::Tensor unpack(const at::Tensor& packed, int64_t dim) {
  return packed.movedim(0, dim).contiguous();
}

Shape packed_shape(Shape shape, int64_t dim, int64_t rows) {
  shape.erase(shape.begin() + dim);
  shape.insert(shape.begin(), rows);
  return shape;
}

// Elements of each rank's block of a packed tensor.
std::vector<int64_t> block_counts(const Shape& shape, int64_t dim, int ranks) {
  std::vector<int64_t> counts;
  for (int rank = 0; rank < ranks; ++rank) {
    const auto rows = layout::ceiling_chunk(shape[dim], ranks, rank).size();
    counts.push_back(layout::numel_of(with_size(shape, dim, rows)));
  }
  return counts;
}

}  // namespace

DistributedTensor::DistributedTensor(const at::Tensor& shard, Shape global_shape, int64_t dim,
                                     comm::Group group)
    : global_shape_(std::move(global_shape)), group_(std::move(group)) {
  dim = wrap_dim("distributed_tensor", dim, global_shape_, group_);
  partition_ = partition_of(global_shape_, dim, group_);
  const auto expected = with_size(global_shape_, dim, partition_.end - partition_.start);
  if (shard.sizes() != at::IntArrayRef(expected)) {
    throw ConfigError(
        format("[distributed_tensor] rank {}: the shard has shape {}, must have {}, its part of {} "
               "cut along "
               "dim {} over {} ranks",
               group_.rank(), layout::describe(shard.sizes().vec()), layout::describe(expected),
               layout::describe(global_shape_), dim, group_.size()));
  }
  local_ = shard.detach();
}

DistributedTensor DistributedTensor::partition(const at::Tensor& whole, int64_t dim,
                                               comm::Group group) {
  const auto shape = whole.sizes().vec();
  dim = wrap_dim("partition", dim, shape, group);
  const auto part = partition_of(shape, dim, group);
  // A copy: a view would keep the whole tensor in memory, and writes to the shard would reach it.
  const auto shard = whole.detach()
                         .narrow(dim, part.start, part.end - part.start)
                         .clone(at::MemoryFormat::Contiguous);
  return {shard, shape, dim, std::move(group)};
}

DistributedTensor DistributedTensor::reduce_scatter(const at::Tensor& contribution, int64_t dim,
                                                    comm::Group group,
                                                    const comm::ReduceOptions& options) {
  const auto shape = contribution.sizes().vec();
  dim = wrap_dim("reduce_scatter", dim, shape, group);
  const auto part = partition_of(shape, dim, group);
  const auto input = pack(contribution, dim);
  const auto output = input.new_empty(packed_shape(shape, dim, part.end - part.start));
  comm::reduce_scatter(output, input, group,
                       {.op = options.op,
                        .counts = block_counts(shape, dim, group.size()),
                        .timeout = options.timeout,
                        .tag = options.tag})
      .wait();
  return {unpack(output, dim), shape, dim, std::move(group)};
}

layout::Shape DistributedTensor::local_shape(layout::Shape global_shape, int64_t dim,
                                             const comm::Group& group) {
  dim = wrap_dim("local_shape", dim, global_shape, group);
  const auto part = partition_of(global_shape, dim, group);
  return with_size(std::move(global_shape), dim, part.end - part.start);
}

layout::Shape DistributedTensor::local_shape() const { return local_.sizes().vec(); }

bool DistributedTensor::requires_communication(TensorOp op, std::optional<int64_t> dim) const {
  const char* const operation = "requires_communication";
  if (dim) dim = wrap_dim(operation, *dim, global_shape_, group_);
  const auto refuse_dim = [&](const char* rule) {
    throw ConfigError(format("[{}] rank {}: {}", operation, group_.rank(), rule));
  };
  if (op == TensorOp::redistribute && !dim) refuse_dim("redistribute needs the dim to cut along");
  if (op != TensorOp::redistribute && op != TensorOp::reduce && dim)
    refuse_dim("a dim is given for an operation that has none; reduce and redistribute do");
  if (group_.size() == 1) return false;
  const auto dims = static_cast<int64_t>(global_shape_.size());
  switch (op) {
    case TensorOp::elementwise:
      return false;
    case TensorOp::reduce:
      return !dim || *dim == partition_.dim;
    case TensorOp::matmul_left:  // sums over the last dimension
      return partition_.dim == dims - 1;
    case TensorOp::matmul_right:  // sums over the last but one, or that of a vector
      return partition_.dim == std::max<int64_t>(dims - 2, 0);
    case TensorOp::all_gather:
      return true;
    default:
      return *dim != partition_.dim;
  }
}

layout::Placement DistributedTensor::placement(std::string name, const std::string& axis) const {
  return layout::Placement::whole(std::move(name), global_shape_)
      .narrow(partition_.dim, {partition_.start, partition_.end}, axis);
}

at::Tensor DistributedTensor::all_gather(const comm::CollectiveOptions& options) const {
  const auto dim = partition_.dim;
  const auto output = local_.new_empty(packed_shape(global_shape_, dim, global_shape_[dim]));
  comm::all_gather(output, pack(local_, dim), group_,
                   {.counts = block_counts(global_shape_, dim, group_.size()),
                    .timeout = options.timeout,
                    .tag = options.tag})
      .wait();
  return unpack(output, dim);
}

DistributedTensor DistributedTensor::redistribute(int64_t dim,
                                                  const comm::CollectiveOptions& options) const {
  const auto from = partition_.dim;
  const auto to = wrap_dim("redistribute", dim, global_shape_, group_);
  if (to == from) return {local_.clone(), global_shape_, to, group_};

  // Rank r has rows r of `from` and needs columns r of `to`; so its block for rank q is (rows r,
  // columns q).
  const auto ranks = group_.size();
  const auto rows = [&](int rank) {
    return layout::ceiling_chunk(global_shape_[from], ranks, rank);
  };
  const auto mine = partition_of(global_shape_, to, group_);
  const auto new_shape = with_size(global_shape_, to, mine.end - mine.start);
  const auto block_shape = [&](int rank) { return with_size(new_shape, from, rows(rank).size()); };

  const auto input = pack(local_, to);
  auto input_counts =
      block_counts(with_size(global_shape_, from, partition_.end - partition_.start), to, ranks);
  std::vector<int64_t> output_counts;
  for (int rank = 0; rank < ranks; ++rank)
    output_counts.push_back(layout::numel_of(block_shape(rank)));
  const auto output = local_.new_empty({layout::numel_of(new_shape)});
  comm::all_to_all(output, input, group_,
                   {.input_counts = std::move(input_counts),
                    .output_counts = output_counts,
                    .timeout = options.timeout,
                    .tag = options.tag})
      .wait();

  const auto shard = local_.new_empty(new_shape);
  int64_t offset = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    const auto block = output.narrow(0, offset, output_counts[rank])
                           .view(packed_shape(block_shape(rank), to, mine.end - mine.start));
    shard.narrow(from, rows(rank).begin, rows(rank).size()).copy_(block.movedim(0, to));
    offset += output_counts[rank];
  }
  return {shard, global_shape_, to, group_};
}

comm::Work DistributedTensor::all_reduce(const comm::Group& replicas,
                                         comm::ReduceOptions options) const {
  return comm::all_reduce(local_, replicas, std::move(options));
}

comm::Work DistributedTensor::broadcast(const comm::Group& replicas,
                                        comm::RootedOptions options) const {
  return comm::broadcast(local_, replicas, std::move(options));
}

comm::Work DistributedTensor::send(int to, const comm::Group& peers,
                                   comm::CollectiveOptions options) const {
  return comm::send(local_, to, peers, std::move(options));
}

comm::Work DistributedTensor::recv(int from, const comm::Group& peers,
                                   comm::CollectiveOptions options) const {
  return comm::recv(local_, from, peers, std::move(options));
}

}  // namespace lockstep::mesh
