// SPDX-License-Identifier: Apache-2.0
#include "lockstep/mesh/model_parallel_context.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <set>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/require.h"
#include "lockstep/layout/enum_names.h"
#include "lockstep/layout/shard_math.h"

namespace lockstep::mesh {
namespace {

constexpr std::array<std::string_view, 3> kStrategies = {"pipeline", "tensor", "hybrid"};

constexpr Requirement require_context("model_parallel");

std::vector<int> gather_local_ranks(const comm::Group& group) {
  const at::Tensor all = at::empty({group.size()}, at::kInt);
  comm::all_gather(all, at::full({1}, group.local_rank(), at::kInt), group,
                   {.tag = "ranks of a host"})
      .wait();
  return {all.data_ptr<int>(), all.data_ptr<int>() + group.size()};
}

}  // namespace

std::string_view name_of(Strategy strategy) { return layout::enum_name(kStrategies, strategy); }

Strategy parse_strategy(std::string_view name) {
  return layout::parse_enum<Strategy>("model-parallel strategy", kStrategies, name);
}

std::string ModelParallelConfig::backend_name() const { return backend.value_or("auto"); }

std::vector<Axis> ModelParallelConfig::mesh_axes() const {
  const int depth = pipeline_depth.value_or(num_devices);
  switch (strategy) {
    case Strategy::pipeline:
      if (depth == num_devices) return {{"pp", depth}};
      return {{"dp", num_devices / depth}, {"pp", depth}};
    case Strategy::tensor: {
      const auto [rows, columns] = layout::nearly_square(num_devices);
      return {{"row", rows}, {"col", columns}};
    }
    default: {
      if (!pipeline_depth) {
        const auto [dp, tp, pp] = layout::nearly_cubic(num_devices);
        return {{"dp", dp}, {"tp", tp}, {"pp", pp}};
      }
      const auto [dp, tp] = layout::nearly_square(num_devices / depth);
      return {{"dp", dp}, {"tp", tp}, {"pp", depth}};
    }
  }
}

void ModelParallelConfig::validate(int group_size, std::optional<int> ranks_per_host) const {
  require_context(num_devices >= 1, format("{} devices, must be at least 1", num_devices));
  require_context(num_devices == group_size,
                  format("{} devices, must equal group size {}", num_devices, group_size));
  const auto ids = format("device ids ({})", join(device_ids));
  const int needed = ranks_per_host.value_or(num_devices);
  require_context(
      static_cast<int>(device_ids.size()) >= needed,
      format("{} are {}, but a host has {} ranks of the group: name a device for each of them", ids,
             device_ids.size(), needed));
  require_context(
      static_cast<int>(device_ids.size()) <= num_devices,
      format("{} are {}, more than the {} devices", ids, device_ids.size(), num_devices));
  require_context(std::all_of(device_ids.begin(), device_ids.end(), [](int id) { return id >= 0; }),
                  ids + " must be at least 0");
  require_context(std::set(device_ids.begin(), device_ids.end()).size() == device_ids.size(),
                  ids + " must differ from each other");
  if (pipeline_depth) {
    require_context(*pipeline_depth >= 1,
                    format("pipeline depth {}, must be at least 1", *pipeline_depth));
    require_context(strategy != Strategy::tensor || *pipeline_depth == 1,
                    format("pipeline depth {} with the tensor strategy, must be 1; hybrid has both",
                           *pipeline_depth));
    require_context(
        num_devices % *pipeline_depth == 0,
        format("{} devices must be divisible by pipeline depth {}", num_devices, *pipeline_depth));
  }
  require_context(!backend || !backend->empty(), "the backend's name is empty");
}

ModelParallelContext::ModelParallelContext(ModelParallelConfig config, comm::Group group)
    : config_(std::move(config)),
      group_(std::move(group)),
      local_ranks_(gather_local_ranks(group_)) {
  // Of the host that has most, so that all ranks refuse the same configurations.
  config_.validate(group_.size(), *std::max_element(local_ranks_.begin(), local_ranks_.end()) + 1);
  // A group of one does not communicate, so any backend will do.
  const auto wanted = config_.backend.value_or("auto");
  require_context(wanted == "auto" || group_.size() == 1 || wanted == group_.backend(),
                  format("rank {}: backend {} is configured, the group uses {}", group_.rank(),
                         wanted, group_.backend()));
  mesh_ = Mesh(group_, config_.mesh_axes());
}

ModelParallelContext ModelParallelContext::init(ModelParallelConfig config) {
  auto group = comm::init({.backend = config.backend_name()});
  return {std::move(config), std::move(group)};
}

int ModelParallelContext::device_id(int rank) const {
  require_context(rank >= 0 && rank < size(),
                  format("rank {}, must be at least 0 and below {}", rank, size()));
  return config_.device_ids[static_cast<size_t>(local_ranks_[static_cast<size_t>(rank)])];
}

at::Device ModelParallelContext::device() const { return *device_at(rank()); }

std::optional<at::Device> ModelParallelContext::device_at(int rank) const {
  if (rank < 0 || rank >= size()) return std::nullopt;
  if (group_.backend() != "nccl") return at::Device(at::kCPU);
  return at::Device(at::kCUDA, static_cast<at::DeviceIndex>(device_id(rank)));
}

std::optional<at::Device> ModelParallelContext::device_at(std::span<const int> coordinate) const {
  const auto rank = mesh_.rank_at(coordinate);
  return rank ? device_at(*rank) : std::nullopt;
}

std::optional<at::Device> ModelParallelContext::device_at(
    std::initializer_list<int> coordinate) const {
  return device_at(std::span<const int>(coordinate.begin(), coordinate.size()));
}

comm::Group ModelParallelContext::group(std::string_view axis) const {
  return axis.empty() ? group_ : mesh_[axis].group();
}

int64_t ModelParallelContext::split_dim(const CutOptions& cut) const {
  return cut.dim ? *cut.dim : config_.tensor_split_dim.value_or(0);
}

layout::Shape ModelParallelContext::local_shape(layout::Shape global_shape,
                                                const CutOptions& cut) const {
  return DistributedTensor::local_shape(std::move(global_shape), split_dim(cut), group(cut.axis));
}

bool ModelParallelContext::requires_communication(const DistributedTensor& tensor, TensorOp op,
                                                  std::optional<int64_t> dim) const {
  return tensor.requires_communication(op, dim);
}

DistributedTensor ModelParallelContext::partition(const at::Tensor& whole,
                                                  const CutOptions& cut) const {
  return DistributedTensor::partition(whole, split_dim(cut), group(cut.axis));
}

DistributedTensor ModelParallelContext::reduce_scatter(const at::Tensor& contribution,
                                                       const CutOptions& cut,
                                                       const comm::ReduceOptions& options) const {
  return DistributedTensor::reduce_scatter(contribution, split_dim(cut), group(cut.axis), options);
}

at::Tensor ModelParallelContext::all_gather(const DistributedTensor& tensor,
                                            const comm::CollectiveOptions& options) const {
  return tensor.all_gather(options);
}

DistributedTensor ModelParallelContext::redistribute(const DistributedTensor& tensor, int64_t dim,
                                                     const comm::CollectiveOptions& options) const {
  return tensor.redistribute(dim, options);
}

comm::Work ModelParallelContext::all_reduce(const at::Tensor& tensor, std::string_view axis,
                                            comm::ReduceOptions options) const {
  return comm::all_reduce(tensor, group(axis), std::move(options));
}

comm::Work ModelParallelContext::broadcast(const at::Tensor& tensor, std::string_view axis,
                                           comm::RootedOptions options) const {
  return comm::broadcast(tensor, group(axis), std::move(options));
}

comm::Work ModelParallelContext::send(const at::Tensor& tensor, int to, std::string_view axis,
                                      comm::CollectiveOptions options) const {
  return comm::send(tensor, to, group(axis), std::move(options));
}

comm::Work ModelParallelContext::recv(const at::Tensor& tensor, int from, std::string_view axis,
                                      comm::CollectiveOptions options) const {
  return comm::recv(tensor, from, group(axis), std::move(options));
}

}  // namespace lockstep::mesh
