// SPDX-License-Identifier: Apache-2.0
// What a training trains, however ranks share it. Private: not installed.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "lockstep/checkpoint/slices.h"
#include "lockstep/comm/group.h"
#include "lockstep/config/train_config.h"
#include "lockstep/mesh/mesh.h"
#include "lockstep/model/decoding.h"
#include "lockstep/model/layers.h"
#include "lockstep/nn/random/random_context.h"
#include "lockstep/optim/optimizer.h"
#include "lockstep/parallel/pipeline/pipeline.h"
#include "lockstep/train/batches.h"
#include "lockstep/train/integrity/gradient_watch.h"

namespace lockstep::train {

// The part of a step that one data-parallel rank computes.
struct StepInput {
  std::function<Tensors()> next;  // the next micro-batch
  int64_t step = 0;
  int64_t first_micro_batch = 0;  // counted over all data-parallel ranks
  double loss_scale = 1;          // of the sum over targets; gradients are averaged over dp ranks
  bool is_recorded = true;        // where the configuration allows that
};

// A language model over the ranks of a job. All functions are collective.
class TrainedModel {
 public:
  // With its initial values. With `decoding` it generates text, and is not trained: it has no
  // memory for gradients and optimizer state.
  TrainedModel(const config::TrainConfig& config, c10::Device device, const comm::Group& world,
               const std::shared_ptr<model::Decoding>& decoding = {});

  const parallel::Pipeline& pipeline() const { return pipeline_; }

  // The ranks on the axes "dp", "tp" and "pp". Those that share rows are on "dp".
  const mesh::Mesh& mesh() const { return pipeline_.mesh(); }
  // The ranks that share the tokens of each row.
  const comm::Group& context() const { return context_; }
  // Which of the ranks with rows of their own this one belongs to.
  int replica() const { return replica_; }

  // Forward and backward of all micro-batches. Their losses, perhaps still on the device.
  at::Tensor step(const StepInput& input);
  // For each batch the sum of its tokens' losses, in eval mode.
  std::vector<double> evaluate(std::span<const Tensors> batches);
  // Of a whole sequence (1, seq_len), in eval mode: this rank's columns of the logits at a
  // position, as floats on the CPU. Nothing on ranks without the last stage.
  at::Tensor logits(const at::Tensor& sequence, int64_t position);
  // How many batches evaluate() should be given at once.
  int64_t batches_at_once() const;

  // For the optimizer.
  std::vector<optim::NamedParameter> parameters() const { return pipeline_.named_parameters(); }
  // Of the whole model.
  double grad_norm() const;
  // Which ranks' own losses or gradients were not finite in the last step, before gradients were
  // averaged. `losses` are what step() returned.
  std::string nonfinite_cause(const at::Tensor& losses, const comm::Group& world) const;
  std::vector<checkpoint::NamedSlice> slices() const;
  std::vector<checkpoint::NamedSlice> slices(optim::Optimizer& optimizer) const;
  // The stages of this rank, where they are sharded or offloaded.
  std::vector<parallel::ShardedModel> sharded() const { return pipeline_.sharded(); }
  // Memory that it has outside torch's allocator, without symmetric memory.
  int64_t arena_bytes() const;
  // Lines for people: "shard  full: 1.2M of 4.8M parameters ..."; what is as usual gives none.
  std::vector<std::string> describe() const;

 private:
  at::Tensor loss(const at::Tensor& logits, const at::Tensor& target, double scale) const;
  // Of a model's outputs, which are the loss itself where rows are computed in tiles.
  at::Tensor loss_of(const parallel::Tensors& outputs, const Tensors& batch, double scale) const;
  // What is recorded reads its batch where this puts it.
  const Tensors& in_place(const Tensors& batch);
  // Before the forward of each micro-batch.
  void prepare_tiles(const Tensors& batch, double scale);

  comm::Group context_;
  int replica_;
  std::shared_ptr<nn::RandomContext> random_;
  std::shared_ptr<model::Tiling> tiling_;  // null: rows are computed at once
  bool exact_norm_;
  bool updates_in_backward_;
  int64_t vocab_;
  std::string frozen_;
  GradientWatch watch_;
  std::map<std::vector<int64_t>, Tensors> places_;  // of what is recorded, by shape
  parallel::Pipeline pipeline_;
};

// The optimizer that the configuration names, over the model's parameters.
std::unique_ptr<optim::Optimizer> make_optimizer(const config::TrainConfig& config,
                                                 const TrainedModel& model);

}  // namespace lockstep::train
