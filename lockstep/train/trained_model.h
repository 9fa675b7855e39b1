// What a training trains, however ranks share it. Private: not installed.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "lockstep/checkpoint/slices.h"
#include "lockstep/config/train_config.h"
#include "lockstep/mesh/mesh.h"
#include "lockstep/optim/optimizer.h"
#include "lockstep/train/batches.h"

namespace lockstep::train {

// The part of a step that one data-parallel rank computes.
struct StepInput {
  std::function<Tensors()> next;  // the next micro-batch
  int64_t step = 0;
  int64_t first_micro_batch = 0;  // counted over all data-parallel ranks
  double loss_scale = 1;          // of the sum over tokens; gradients are averaged over dp ranks
};

// All functions are collective.
class TrainedModel {
 public:
  virtual ~TrainedModel() = default;

  // Forward and backward of all micro-batches. Their losses, on some device.
  virtual at::Tensor step(const StepInput& input) = 0;
  // For each batch the sum of its tokens' losses, in eval mode.
  virtual std::vector<double> evaluate(std::span<const Tensors> batches) = 0;
  // How many batches evaluate() should be given at once.
  virtual int64_t batches_at_once() const { return 1; }

  // For the optimizer.
  virtual std::vector<optim::NamedParameter> parameters() const = 0;
  // The norm of all gradients before they are clipped; 0: they are not.
  virtual double clip_grad_norm(double max_norm) = 0;
  virtual std::vector<checkpoint::NamedSlice> slices(optim::Optimizer& optimizer) const = 0;
  // Lines for people: "shard  full: 1.2M of 4.8M parameters ..."; what is as usual gives none.
  virtual std::vector<std::string> describe() const = 0;
};

// With its first values. Collective.
std::unique_ptr<TrainedModel> make_model(const config::TrainConfig& config, c10::Device device,
                                         const mesh::Mesh& mesh);

}  // namespace lockstep::train
