// SPDX-License-Identifier: Apache-2.0
// Runs a rank's program: a list of actions over its stages. Private: not installed.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/parallel/pipeline/mailbox.h"
#include "lockstep/parallel/pipeline/pipeline.h"
#include "lockstep/parallel/pipeline/progress.h"
#include "lockstep/parallel/pipeline/stage.h"
#include "lockstep/parallel/pipeline/stage_graphs.h"
#include "lockstep/parallel/pipeline/tied.h"
#include "lockstep/parallel/pipeline/timeline.h"

namespace lockstep::parallel::detail {

// The ranks that differ from this one on one axis of the mesh, and those of all three.
struct Axes {
  comm::Group pipeline, data, tensor, all;
};

class PipelineEngine {
 public:
  // Collective over all.
  PipelineEngine(const std::vector<Layer>& layers, const Axes& axes, PipelineOptions options);

  at::Tensor step(const PipelineBatch& batch, PipelineStep options);
  at::Tensor evaluate(const PipelineBatch& batch, int microbatches);
  bool hold(int64_t budget) const;

  double grad_norm(optim::NormOptions options) const;
  std::vector<optim::NamedParameter> counted_parameters() const;
  const comm::Group& counted_group() const { return norm_group_; }
  std::vector<optim::NamedParameter> named_parameters() const;

  const std::vector<std::unique_ptr<Stage>>& stages() const { return stages_; }
  const TensorParallel& tensor() const { return tensor_; }
  int stage(size_t chunk) const { return layout().stage(rank(), static_cast<int>(chunk)); }
  const schedule::Pipeline& layout() const { return program_; }
  int rank() const { return pipeline_.rank(); }
  bool owns_stage(int stage) const { return layout().place(stage).rank == rank(); }
  bool is_tied_copy(size_t chunk, const std::string& name) const;

  const PipelineOptions options;
  schedule::Schedule schedule;
  PipelineStats stats;
  std::vector<TimedAction> timeline;

  const schedule::Program& program() const { return program_; }

 private:
  // What one run of a program needs.
  struct ProgramRun {
    const PipelineBatch& batch;
    bool reduces = true;
    bool trains = true;
    bool leave = false;                  // the losses, as PipelineStep says
    Tensors losses = {};                 // on the last stage's rank, of each micro-batch
    std::vector<Tensors> outgoing = {};  // per chunk: what its last computation gave
    Clock::time_point started = {};      // the computation that runs
  };

  void build(const std::vector<Layer>& layers, const Axes& axes);
  void check_plan();
  at::Tensor exchange_losses(const Tensors& losses, bool leave);
  void abort(const std::string& why);
  at::Tensor run(const schedule::Program& program, ProgramRun run);
  void act(const schedule::Action& action, bool reduces_next, ProgramRun& run);
  void compute(const schedule::Action& action, bool syncs, ProgramRun& run);
  Tensors forward(const schedule::Action& action, ProgramRun& run);
  // Where micro-batches are recorded: undefined, if this one is to be computed.
  at::Tensor recorded_forward(const schedule::Action& action, const Tensors& inputs,
                              const Stage::Loss& loss, const ProgramRun& run);
  Tensors inputs_of(const schedule::Action& action, const ProgramRun& run);
  void pass_on(const schedule::Action& action, Tensors tensors, ProgramRun& run);
  void note_memory();
  void add_to_trace(const TimedAction& timed, const ProgramRun& run) const;

  // A message from the stage `step` further, for a chunk of this rank.
  Tensors take(const schedule::Action& action, int step);

  comm::Group all_, pipeline_, norm_group_;  // all_: the ranks of all axes
  TensorParallel tensor_;
  int data_rank_;
  schedule::Program program_, forward_program_;
  std::vector<std::unique_ptr<Stage>> stages_;  // one for each chunk
  std::optional<c10::Stream> stream_;  // of the model and its steps, where they are recorded
  std::unique_ptr<StageGraphs> graphs_;
  std::unique_ptr<TiedParameters> tied_;
  milliseconds patience_;  // of what waits for other ranks' computations
  Mailbox mailbox_;
  int64_t first_microbatch_ = 0;  // where steps accumulate
  int64_t num_steps_ = 0;
  Progress progress_;  // whose thread ends first
};

}  // namespace lockstep::parallel::detail
