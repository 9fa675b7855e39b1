// SPDX-License-Identifier: Apache-2.0
// Data parallelism in which no rank holds the whole model: every rank has a shard of the
// parameters, of their gradients and of the optimizer's state.
//
//   auto sharded = parallel::fully_shard(*model, mesh["dp"]);
//   torch::optim::AdamW optimizer(sharded.parameters());
//   auto loss = torch::nn::functional::cross_entropy(model->forward(input), target);
//   loss.backward();      // parameters come and go, gradients are averaged and shared out
//   optimizer.step();
//
// Submodules that were sharded before are units of their own, with their own options:
//
//   for (auto& block : model->blocks) parallel::fully_shard(*block, mesh["dp"], of_blocks);
//   auto sharded = parallel::fully_shard(*model, mesh["dp"], of_the_rest);
//
// The model stays as it is. Its parameters have no values while they are not used; any operator
// that is given one waits for them. Code that reads memory itself (data_ptr(), accessors,
// torch::save) needs summon().
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/core/torch_fwd.h"
#include "lockstep/layout/placement.h"
#include "lockstep/mesh/mesh.h"
#include "lockstep/optim/clip.h"
#include "lockstep/optim/parameters/parameters.h"
#include "lockstep/parallel/intercept/deferred.h"
#include "lockstep/parallel/shard/options.h"

namespace lockstep::parallel {

using layout::ParameterState;

// This rank's part of a parameter, in elements of it.
struct ShardInfo {
  int rank = 0;
  int64_t start = 0;
  int64_t size = 0;
  std::vector<int64_t> original_shape = {};
  bool is_local = false;  // this rank has some of it
};

// Counted, not computed.
struct ShardStats {
  int64_t num_parameters = 0;
  double local_ratio = 1;     // of all elements, those that this rank's optimizer updates
  int64_t current_bytes = 0;  // of parameters and gradients, in every form, on this rank
  int64_t peak_bytes = 0;
  int64_t bytes_saved = 0;  // what the whole parameters and gradients have more than now
  int64_t all_gathers = 0;
  int64_t fetched_ahead = 0;  // of them, before they were needed
  int64_t reduce_scatters = 0;
  int64_t all_reduces = 0;     // of what is whole
  int64_t gather_bytes = 0;    // memory that gathered parameters occupy, used or not
  int64_t gradient_bytes = 0;  // memory that gradients occupy on their way to the shards
  int64_t growths = 0;         // how often either was enlarged
};

// A rank's part of one tensor of the model.
struct NamedShard {
  layout::Placement placement;
  at::Tensor tensor;
};

namespace detail {
class ShardEngine;
class ShardedModelState;
class Recording;
}  // namespace detail

// While one is alive, a backward does not end in gradients for the optimizer; see NoSyncGradients.
class [[nodiscard]] NoSyncShards {
 public:
  explicit NoSyncShards(std::shared_ptr<detail::ShardedModelState> sharded);
  ~NoSyncShards();
  NoSyncShards(NoSyncShards&&) = default;
  NoSyncShards& operator=(NoSyncShards&&) = delete;

 private:
  std::shared_ptr<detail::ShardedModelState> sharded_;
};

struct SummonOptions {
  // Parameters may be written. Every rank must write the same values, and keeps its part of them.
  bool write_back = false;
};

// While one is alive, all parameters are whole and in memory. Made on all ranks or, to read under
// thread and shm, on one; after a step, that one waits until the others use the model.
class [[nodiscard]] Summon {
 public:
  Summon(std::shared_ptr<detail::ShardedModelState> sharded, SummonOptions options);
  ~Summon();
  Summon(Summon&&) = default;
  Summon& operator=(Summon&&) = delete;

 private:
  std::shared_ptr<detail::ShardedModelState> sharded_;
  SummonOptions options_;
};

// A value: copies share everything. Keep one as long as the model is used.
class ShardedModel {
 public:
  explicit ShardedModel(std::shared_ptr<detail::ShardedModelState> sharded)
      : sharded_(std::move(sharded)) {}

  // What the optimizer updates: one flat shard for each unit, or with use_orig_params this rank's
  // rows of each parameter; and tensors that are whole. On a group of one, the model's own.
  std::vector<at::Tensor> parameters() const;
  std::vector<optim::NamedParameter> named_parameters() const;

  // Of all shards; collective. Summed as NormOptions says, but exact if the model is reproducible.
  double grad_norm(optim::NormOptions options = {}) const;
  double clip_grad_norm_(double max_norm, optim::NormOptions options = {}) const;

  // What this rank adds to a norm over several models: every element of the model's gradients is
  // counted by one rank of each set of ranks that share it out.
  std::vector<optim::NamedParameter> norm_parameters() const;

  NoSyncShards no_sync() { return NoSyncShards(shared()); }
  // Reduces what backward passes under no_sync() left, as the end of one without it would.
  // Collective.
  void reduce_gradients();
  // Which micro-batch of the step the next backward is of, where they do not come in order (a
  // pipeline); none: the next. Matters to the sum of reproducible mode.
  void set_micro_batch(std::optional<int64_t> index);
  // Gathers a unit, or all, until reshard().
  void unshard(const std::string& unit = {});
  void reshard(const std::string& unit = {});
  // For inference: gathers all units and keeps them until reshard(), if they take at most `budget`
  // bytes on this rank's device, within the budgets of offload. False: forward gathers each unit
  // for its use, as before. The same answer on all ranks. Values that are written later (a step, a
  // load) are gathered again by the next use. Collective.
  bool hold(int64_t budget);
  Summon summon(SummonOptions options = {}) { return {shared(), options}; }
  // Before shards are written otherwise than by a step after a backward. Collective.
  void begin_update();

  void train(bool on = true);
  void eval() { train(false); }
  bool is_training() const;

  const FullyShardOptions& options() const;
  std::vector<std::string> units() const;
  // ConfigError for a name that the model does not have, or whose parameter is whole.
  ShardInfo shard_info(const std::string& parameter) const;
  // ConfigError for a name that the model does not have.
  ParameterState state(const std::string& parameter) const;
  ShardStats stats() const;

  // Every parameter and buffer, whole, on the CPU. Collective: all ranks get all.
  std::vector<optim::NamedTensor> full_state_dict() const;
  // This rank's parts, which are not copies. Not collective.
  std::vector<NamedShard> sharded_state_dict() const;
  // Collective. ConfigError, before anything is written, unless names and shapes are those that
  // full_state_dict() gives.
  void load_full_state_dict(std::span<const optim::NamedTensor> values);
  // Parts of something that belongs to a tensor of parameters(), by that tensor's name: optimizer
  // state of its shape. Other shapes (step counts) belong to the whole parameter.
  std::vector<NamedShard> parts_of(const std::string& parameter, const at::Tensor& tensor) const;

  // Error where the model has become a part of a larger sharded one.
  std::shared_ptr<detail::ShardedModelState> shared() const;

 private:
  std::shared_ptr<detail::ShardedModelState> sharded_;
};

// Shards the model over the group, or over the axes of the mesh: with hybrid_shard the second of
// two, along the first of which the shards are replicated. All ranks get rank 0's parameters and
// buffers. Collective. Nothing is installed on a group of one, unless options ask for it or
// LOCKSTEP_REHEARSE is 1: then it refuses what several ranks would.
//
// Sharded submodules become a part of the model; what was returned for them is not needed, and
// throws Error from then on. Their units keep the options that they were sharded with; the
// outermost call decides prefetching, limit_all_gathers, no_sync and OffloadOptions for all.
// ConfigError where an inner call was given other ones, or other ranks, and where the submodule was
// trained, or given to an optimizer: make that last. A submodule whose parameters are on the meta
// device gets its values with the model around it.
ShardedModel fully_shard(torch::nn::Module& model, const comm::Group& group,
                         FullyShardOptions options = {});
ShardedModel fully_shard(torch::nn::Module& model, const mesh::Mesh& mesh,
                         FullyShardOptions options = {});
// The same for a module's holder. `ranks` is a group or a mesh.
template <class T, class Ranks>
ShardedModel fully_shard(const torch::nn::ModuleHolder<T>& model, const Ranks& ranks,
                         FullyShardOptions options = {}) {
  return fully_shard(*model.ptr(), ranks, std::move(options));
}

// The same for a model that was built without memory: tensors get their initial values, as
// materialize() would give them, and are shared out one after the other.
namespace detail {
ShardedModel fully_shard_deferred(torch::nn::Module& model, const Recording& recording,
                                  const mesh::Mesh& mesh, FullyShardOptions options,
                                  const MaterializeOptions& initializer);
mesh::Mesh as_mesh(const comm::Group& group);
}  // namespace detail
template <class Model>
ShardedModel fully_shard(Deferred<Model>& deferred, const mesh::Mesh& mesh,
                         FullyShardOptions options = {},
                         const MaterializeOptions& initializer = {}) {
  return detail::fully_shard_deferred(*deferred.model, *deferred.recording, mesh,
                                      std::move(options), initializer);
}
template <class Model>
ShardedModel fully_shard(Deferred<Model>& deferred, const comm::Group& group,
                         FullyShardOptions options = {},
                         const MaterializeOptions& initializer = {}) {
  return fully_shard(deferred, detail::as_mesh(group), std::move(options), initializer);
}

}  // namespace lockstep::parallel
