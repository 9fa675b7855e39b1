// SPDX-License-Identifier: Apache-2.0
// Pipeline parallelism: a model in stages on the ranks of a group, run by a schedule.
//
//   parallel::Pipeline pipeline(
//       layers, mesh, {.schedule = parallel::PipelineSchedule::zb_h1, .microbatches = 8});
//   optim::AdamW optimizer(pipeline.named_parameters(), {.lr = 1e-3});
//   const at::Tensor losses = pipeline.step(
//       {.inputs = [&](int i) { return parallel::Tensors{tokens[i]}; },
//        .loss = [&](int i, const parallel::Tensors& out) { return loss(out[0], targets[i]); }});
//   pipeline.clip_grad_norm_(1);
//   optimizer.step();
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "lockstep/core/clock.h"
#include "lockstep/layout/parallel_config.h"
#include "lockstep/mesh/mesh.h"
#include "lockstep/nn/random/random_context.h"
#include "lockstep/optim/clip.h"
#include "lockstep/optim/parameters/parameters.h"
#include "lockstep/parallel/data/ddp.h"
#include "lockstep/parallel/pipeline/layer.h"
#include "lockstep/parallel/recompute/recompute.h"
#include "lockstep/parallel/shard/fully_shard.h"
#include "lockstep/parallel/tensor/tensor.h"

namespace lockstep::schedule {
struct Schedule;
struct Program;
}  // namespace lockstep::schedule

namespace lockstep::parallel {

// Whether micro-batches are recorded as CUDA graphs and repeated. if_possible: where the memory is
// too small or a recording fails, a line says so, and steps are eager. always: an Error where a
// recording fails, and a ConfigError on another device than CUDA.
enum class PipelineGraphs { none, if_possible, always };

struct PipelineAdvancedOptions {
  // The tensor-parallel ranks share the sequence too, as TensorParallelOptions has it.
  bool sequence_parallel = false;
  // Sharded: stages of a rank that are gathered at a time, by the schedule; 0: every use gathers,
  // as it does where parameters are offloaded.
  int max_unsharded = 3;
  // Layers are built without memory, and get their initial values by this.
  std::optional<MaterializeOptions> initializer = std::nullopt;
  // What of each layer is computed again in backward: nothing, all but products, convolutions and
  // attention, or all of it. `random` is what its random layers share, and `store` where its inputs
  // are kept, or all that autograd saves where nothing is computed again; in memory if there is
  // none.
  layout::Recompute recompute = layout::Recompute::none;
  std::shared_ptr<nn::RandomContext> random = {};
  std::shared_ptr<ActivationStore> store = {};
  int group = 0;  // interleaved and zb-1p: micro-batches a chunk takes in turn; 0: ranks
  std::string schedule_file = {};  // of PipelineSchedule::file
  // Of micro-batches that PipelineBatch::recorded_as names. Unless none, ConfigError where stages
  // are several, sharded or tensor-parallel, where DdpOptions have reproducible, uneven_inputs,
  // static_graph or delay_all_reduce, and where the schedule has other work between a forward and
  // its backward.
  PipelineGraphs graphs = PipelineGraphs::none;
};

using layout::PipelineSchedule;

struct PipelineOptions {
  PipelineSchedule schedule = PipelineSchedule::one_f_one_b;
  int microbatches = 1;         // of a step, on each data-parallel rank
  int chunks = 1;               // stages of a rank
  std::vector<int> split = {};  // layers of each stage, first to last; empty: all equal
  // Parameters that several stages have under the same name, and that are one, in addition to those
  // of tied_layer(): the first stage's, which the optimizer sees, is copied to the others before
  // each step and gets their gradients.
  std::vector<std::string> tied = {};
  // How the ranks of the mesh's axis "tp" share the layers' matrices, if there is one.
  layout::TensorPlan plan = {};
  // How the ranks of the mesh's axis "dp" share each stage.
  std::variant<DdpOptions, FullyShardOptions> data = DdpOptions{};
  c10::Device device = c10::Device(c10::kCPU);  // where tensors from other devices arrive
  PipelineAdvancedOptions advanced = {};
};

// What a step computes. Each function is called once for every micro-batch.
struct PipelineBatch {
  // On the rank of the first stage. They get no gradients.
  std::function<Tensors(int microbatch)> inputs;
  // On the rank of the last stage: one number, whose gradient is taken. Micro-batches' gradients
  // add up, so for the mean over them divide by their number.
  std::function<at::Tensor(int microbatch, const Tensors& outputs)> loss;
  // On every rank, before a stage's forward: to set what random layers depend on.
  std::function<void(int microbatch)> begin = {};
  // With advanced.graphs: a name for what the micro-batch computes. Its forward and backward are
  // recorded in the third step of this name; later steps repeat them and call neither `loss` nor a
  // layer. Micro-batches of one name have the same shapes and constants, and keep inputs (else
  // ConfigError) and all that `loss` reads (not checked) at the same addresses. Layers draw no
  // random numbers, have no hooks and do not depend on the step. Of more than two names, others are
  // eager, and so is the empty one.
  std::function<std::string(int microbatch)> recorded_as = {};
};

struct PipelineStep {
  bool accumulate = false;  // more steps follow before gradients are reduced and used
  // Where one rank has all stages, the losses stay on its device, and no thread waits for them.
  bool leave_losses = false;
};

// Of the last step, on this rank. Counted, not computed.
struct PipelineStats {
  int peak_live = 0;  // micro-batches of all stages between forward and the end of backward
  // Gradients kept from the first half of a backward to the second.
  int64_t peak_kept_bytes = 0;
  std::chrono::nanoseconds waited{0};  // for tensors of other stages
};

struct TimedAction;

namespace detail {
class PipelineEngine;
}

// A value: copies share everything.
class Pipeline {
 public:
  // Of the mesh the axis "pp" is used and, if there are, "dp" and "tp"; or all ranks of a group.
  // Builds this rank's stages. Collective. ConfigError where layers, schedule, plan and ranks do
  // not fit.
  Pipeline(const std::vector<Layer>& layers, const mesh::Mesh& mesh, PipelineOptions options = {});
  Pipeline(const std::vector<Layer>& layers, const comm::Group& group,
           PipelineOptions options = {});

  // Forward and backward of all micro-batches. Returns the losses on every rank of the pipeline, as
  // doubles, on the CPU unless they may be left. Afterwards parameters have their gradients,
  // averaged over "dp". Collective. After an exception, which peers get too, the pipeline cannot be
  // used any more.
  at::Tensor step(const PipelineBatch& batch, PipelineStep options = {});
  // Forward alone, in the mode that train() or eval() set, of any number of micro-batches.
  at::Tensor evaluate(const PipelineBatch& batch, int microbatches);
  // The same without a loss: what the last layer gives for each micro-batch, on the ranks that have
  // the last stage; nothing on the others. `inputs` is called on those that have the first.
  std::vector<Tensors> forward(const std::function<Tensors(int microbatch)>& inputs,
                               int microbatches = 1);

  // For inference: ShardedModel::hold() of this rank's stages together, on all ranks of the
  // pipeline or on none; reshard() of sharded() ends it. A tied parameter of another sharded stage
  // is copied, and its stage gathered again, in each forward. True where no stage is sharded.
  bool hold(int64_t budget);

  // For the optimizer: of this rank's stages, what it is to update.
  std::vector<optim::NamedParameter> named_parameters() const;
  std::vector<at::Tensor> parameters() const;
  // Of the whole model, every parameter once, the same on all ranks. Collective.
  double grad_norm(optim::NormOptions options = {}) const;
  double clip_grad_norm_(double max_norm, optim::NormOptions options = {}) const;
  // What grad_norm() reads: the ranks of counted_group() together have every element of the model
  // once. Shards are flat.
  std::vector<optim::NamedParameter> counted_parameters() const;
  comm::Group counted_group() const;

  void train(bool on = true);
  void eval() { train(false); }
  bool is_training() const;

  bool has_first_stage() const;
  bool has_last_stage() const;
  // This rank's stages: which of the model's, and the modules; sharded ones where data is sharded.
  std::vector<int> stages() const;
  std::vector<std::shared_ptr<torch::nn::Module>> modules() const;
  // The layers of these stages, first to last: for a forward that the pipeline has no part in, of a
  // model that is whole here.
  std::vector<LayerForward> layers() const;
  std::vector<ShardedModel> sharded() const;
  // What the ranks of "tp" share of them.
  const TensorParallel& tensor() const;
  // Names in modules() that another stage's parameter is copied to.
  std::vector<std::string> tied_copies(size_t stage) const;

  const PipelineOptions& options() const;
  // The ranks that it was made on. Made on a group, they are all on the axis "pp".
  const mesh::Mesh& mesh() const { return mesh_; }
  PipelineStats stats() const;
  // For programs in this tree, which have schedule/lower.h and pipeline/timeline.h: what the
  // pipeline does, and what this rank computed in the last step, in order.
  const schedule::Schedule& schedule() const;
  const schedule::Program& program() const;
  std::span<const TimedAction> timeline() const;

 private:
  mesh::Mesh mesh_;
  std::shared_ptr<detail::PipelineEngine> engine_;
};

}  // namespace lockstep::parallel
