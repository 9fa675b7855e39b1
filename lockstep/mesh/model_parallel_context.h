// SPDX-License-Identifier: Apache-2.0
// Model parallelism by strategy: from a few settings to a mesh and the operations on it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/group.h"
#include "lockstep/comm/work.h"
#include "lockstep/mesh/distributed_tensor.h"
#include "lockstep/mesh/mesh.h"

namespace lockstep::mesh {

// pipeline: layers over the ranks; tensor: every layer cut over a 2D grid; hybrid: both, and data
// parallelism.
enum class Strategy { pipeline, tensor, hybrid };

std::string_view name_of(Strategy strategy);
Strategy parse_strategy(std::string_view name);

struct ModelParallelConfig {
  int num_devices = 1;
  // Devices of a host, the same list for all: entry i is for the rank that is the i-th of the group
  // on its host, from the real host layout. At least as many as a host has ranks.
  std::vector<int> device_ids = {0};
  Strategy strategy = Strategy::pipeline;
  std::optional<int> pipeline_depth = std::nullopt;
  std::optional<int64_t> tensor_split_dim =
      std::nullopt;  // where partition names no dim; not set: 0
  // parallel::run_layers computes the activations of layers again instead of keeping them.
  bool gradient_checkpointing = false;
  // A built-in backend, or one that comm::register_backend has under its name. Not set: auto, which
  // is nccl where every rank has a GPU.
  std::optional<std::string> backend = std::nullopt;

  std::string backend_name() const;

  // Axes of the mesh. pipeline: "pp", after "dp" where the depth is less than the devices; tensor:
  // "row" x "col", most nearly square; hybrid: "dp" x "tp" x "pp", with the given depth, else most
  // nearly cubic. The config must be valid.
  std::vector<Axis> mesh_axes() const;

  // Throws ConfigError for the first rule that is broken, with the numbers. `ranks_per_host`: of
  // the host that has most; not set: all are on one.
  void validate(int group_size, std::optional<int> ranks_per_host = std::nullopt) const;
};

// Over which axis of the mesh (empty: all ranks) and along which dimension a tensor is cut.
struct CutOptions {
  std::optional<int64_t> dim = std::nullopt;
  std::string axis = {};
};

// A value: copies share the mesh.
class ModelParallelContext {
 public:
  // Collective over the group.
  ModelParallelContext(ModelParallelConfig config, comm::Group group);
  // Joins the job with the config's backend first. Collective over the job.
  static ModelParallelContext init(ModelParallelConfig config);

  const ModelParallelConfig& config() const { return config_; }
  const Mesh& mesh() const { return mesh_; }
  int rank() const { return group_.rank(); }
  int size() const { return group_.size(); }
  // This rank's entry of config().device_ids, by its place on its host; or another rank's.
  int device_id() const { return device_id(rank()); }
  int device_id(int rank) const;
  // This rank's device: that GPU where the group communicates between GPUs, else the CPU.
  at::Device device() const;
  // The same of another rank, on that rank's host; none for a rank or a coordinate outside the
  // mesh.
  std::optional<at::Device> device_at(int rank) const;
  std::optional<at::Device> device_at(std::span<const int> coordinate) const;
  std::optional<at::Device> device_at(std::initializer_list<int> coordinate) const;
  // The group of an axis; of all ranks for the empty name.
  comm::Group group(std::string_view axis = {}) const;

  // The shape of this rank's part of a tensor, before there is one.
  layout::Shape local_shape(layout::Shape global_shape, const CutOptions& cut = {}) const;
  bool requires_communication(const DistributedTensor& tensor, TensorOp op,
                              std::optional<int64_t> dim = std::nullopt) const;

  DistributedTensor partition(const at::Tensor& whole, const CutOptions& cut = {}) const;
  DistributedTensor reduce_scatter(const at::Tensor& contribution, const CutOptions& cut = {},
                                   const comm::ReduceOptions& options = {}) const;
  at::Tensor all_gather(const DistributedTensor& tensor,
                        const comm::CollectiveOptions& options = {}) const;
  DistributedTensor redistribute(const DistributedTensor& tensor, int64_t dim,
                                 const comm::CollectiveOptions& options = {}) const;

  // In place, as those of comm. Peers are ranks of the axis's group.
  comm::Work all_reduce(const at::Tensor& tensor, std::string_view axis = {},
                        comm::ReduceOptions options = {}) const;
  comm::Work broadcast(const at::Tensor& tensor, std::string_view axis = {},
                       comm::RootedOptions options = {}) const;
  comm::Work send(const at::Tensor& tensor, int to, std::string_view axis = {},
                  comm::CollectiveOptions options = {}) const;
  comm::Work recv(const at::Tensor& tensor, int from, std::string_view axis = {},
                  comm::CollectiveOptions options = {}) const;

 private:
  int64_t split_dim(const CutOptions& cut) const;

  ModelParallelConfig config_;
  comm::Group group_;
  std::vector<int> local_ranks_;  // of each rank: its place among those on its host
  Mesh mesh_;
};

}  // namespace lockstep::mesh
