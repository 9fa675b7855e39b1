// SPDX-License-Identifier: Apache-2.0
// One stage of a pipeline, on the rank that has it. Private: not installed.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/nn/module.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/optim/parameters/parameters.h"
#include "lockstep/parallel/data/ddp.h"
#include "lockstep/parallel/pipeline/layer.h"
#include "lockstep/parallel/pipeline/pipeline.h"
#include "lockstep/parallel/pipeline/split_backward.h"
#include "lockstep/parallel/shard/fully_shard.h"
#include "lockstep/parallel/tensor/tensor.h"

namespace lockstep::parallel::detail {

// How stages are sharded; none: they are not. Of whole tensors, the tied parameters come first:
// they have the same owner in every stage that has them.
std::optional<FullyShardOptions> sharding_of(const PipelineOptions& options);
// The options with what tied layers share among `tied`, by the paths of their modules.
PipelineOptions with_tied_layers(PipelineOptions options, const std::vector<Layer>& layers);

class StageModule : public torch::nn::Module {
 public:
  std::vector<LayerForward> layers;
  std::set<std::string> untied;  // paths of tied layers whose modules other stages must have
};

class Stage {
 public:
  using Loss = std::function<at::Tensor(const Tensors& outputs)>;

  // Collective over the data-parallel ranks, and over those of `tensor`.
  Stage(std::span<const Layer> layers, const comm::Group& data, TensorParallel& tensor,
        const PipelineOptions& options);

  // Keeps what backward needs, unless gradients are off. The inputs are leaves. With a loss the
  // result is the loss alone.
  Tensors forward(int microbatch, Tensors inputs, const Loss* loss);
  // From the gradients of what forward gave (of a loss: none) to those of its inputs. With `syncs`,
  // the gradients of parameters are reduced over the data-parallel ranks as well.
  Tensors backward(int microbatch, const Tensors& gradients, bool syncs);
  // The same in two halves.
  Tensors backward_input(int microbatch, const Tensors& gradients);
  void backward_weight(int microbatch, bool syncs);

  // The backward of the micro-batch by other means: `run` leaves the gradients, and reduces them.
  void backward_by(int microbatch, bool syncs, const std::function<void()>& run);
  // Forgets a micro-batch whose forward or backward has failed.
  void drop(int microbatch) { flights_.erase(microbatch); }
  // What averages the gradients; null where nothing does, or they are sharded.
  Reducer* reducer() const { return whole_ ? whole_->reducer() : nullptr; }

  // Before the first forward of a step.
  void begin_step();
  void unshard();
  void reshard();
  // What was not reduced by a backward that syncs. Collective.
  void reduce();
  // Counts micro-batches from here: more steps add to the same gradients.
  void set_first_microbatch(int64_t first) { first_microbatch_ = first; }

  torch::nn::Module& module() const { return *module_; }
  const std::set<std::string>& untied() const { return module_->untied; }
  std::shared_ptr<torch::nn::Module> shared_module() const { return module_; }
  const std::vector<LayerForward>& layers() const { return module_->layers; }
  std::optional<ShardedModel>& sharded() { return sharded_; }
  const std::optional<ShardedModel>& sharded() const { return sharded_; }
  std::vector<optim::NamedParameter> named_parameters() const;
  std::vector<optim::NamedParameter> norm_parameters() const;
  int live() const { return static_cast<int>(flights_.size()); }
  size_t kept_bytes() const { return kept_bytes_; }

 private:
  using Edges = SplitBackward::Edges;
  // A micro-batch between its forward and the end of its backward.
  struct Flight {
    Tensors inputs;
    at::Tensor loss_gradient;  // where the output is a loss
    Edges outputs;             // not valid for those that need no gradient
    // Where the first half of a split backward ends: at the inputs or, where they need no gradient,
    // behind the first layer that has one.
    Edges entries;
    bool enters_at_inputs = false;
    std::optional<SplitBackward> split;
  };
  class Ddp : public DdpHandle {
   public:
    using DdpHandle::before_forward;
    using DdpHandle::DdpHandle;
    using DdpHandle::reduce_gradients;
    using DdpHandle::reducer;
  };
  using NoSyncGuard = std::variant<std::monostate, NoSync, NoSyncShards>;

  NoSyncGuard synchronised(int microbatch, bool syncs);
  // Roots and gradients of those outputs for which there is one.
  std::pair<Edges, Tensors> begin_backward(const Flight& flight, const Tensors& gradients) const;

  std::shared_ptr<StageModule> module_;
  std::optional<Ddp> whole_;
  std::optional<ShardedModel> sharded_;
  std::map<int, Flight> flights_;
  int64_t first_microbatch_ = 0;
  bool reduced_ = false;
  size_t kept_bytes_ = 0;
};

}  // namespace lockstep::parallel::detail
