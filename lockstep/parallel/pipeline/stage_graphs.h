// SPDX-License-Identifier: Apache-2.0
// A stage's micro-batches as CUDA graphs: forward is one, backward one for each bucket of gradients
// that is averaged. Between these the averaging is started as it is in an eager step, so watchdog,
// recorder and compression see it. Private: not installed.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/memory/device_graph.h"
#include "lockstep/parallel/pipeline/stage.h"
#include "lockstep/schedule/lower.h"

namespace lockstep::parallel::detail {

// ConfigError where a rank's program is not one of whole micro-batches, each computed by itself.
void require_recordable(const PipelineOptions& options, const schedule::Program& program,
                        int tensor_ranks);

// For the only stage of a rank, whose backward follows each forward.
class StageGraphs {
 public:
  // On a stream that is not the default one, as each step is. Where recording fails, an Error if it
  // `must` succeed, and otherwise a warning, and nothing is recorded any more.
  StageGraphs(Stage& stage, c10::Device device, bool must);

  void begin_step();
  // The micro-batch's loss, from a graph; undefined: the caller computes it. `name` and `inputs`
  // are those of PipelineBatch. The first steps of a name are the caller's.
  at::Tensor forward(const std::string& name, int microbatch, const Tensors& inputs,
                     const Stage::Loss& loss, bool syncs);
  // Whether that forward was to be recorded, and failed.
  bool has_failed() const { return failed_; }
  // Of the micro-batch whose forward was last; false: the caller computes it.
  bool backward(int microbatch, bool syncs);

 private:
  struct Piece {
    std::unique_ptr<memory::DeviceGraph> graph;
    std::vector<size_t> arrived;  // parameters whose gradients can be averaged behind it
  };
  struct Recording {
    std::string name;
    bool syncs = false;
    std::vector<int64_t> state, inputs;      // that it is of
    std::vector<at::Tensor> gradients = {};  // after it
    at::Tensor loss = {};
    std::unique_ptr<memory::DeviceGraph> forward = nullptr;
    std::vector<Piece> backward = {};
  };

  // Where parameters and their gradients are, which are trained, and whether layers are training.
  std::vector<int64_t> state_now() const;
  void renew_weights() const;
  std::vector<at::Tensor> gradients() const;
  void set_gradients(const std::vector<at::Tensor>& gradients) const;
  const Recording* find(const std::string& name, bool syncs, const Tensors& inputs,
                        int microbatch) const;
  bool has_place(const std::string& name) const;
  Recording record(const std::string& name, int microbatch, const Tensors& inputs,
                   const Stage::Loss& loss, bool syncs);
  void record_backward(Recording& recording, int microbatch);

  Stage& stage_;
  const bool must_;
  const std::vector<at::Tensor> parameters_;
  std::unique_ptr<memory::GraphRecorder> recorder_;
  std::map<std::string, int> steps_;  // of each name
  std::vector<std::unique_ptr<Recording>> recordings_;
  const Recording* current_ = nullptr;  // of the last forward
  // What the step has repeated so far. Weights in 8 bits are made by its first micro-batch, so that
  // others can only be repeated behind a repeated one.
  std::string repeated_;
  bool has_recorded_ = false;  // in this step
  bool failed_ = false;
};

}  // namespace lockstep::parallel::detail
