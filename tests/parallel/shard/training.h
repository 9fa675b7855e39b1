// SPDX-License-Identifier: Apache-2.0
// The training loop of training.h, over shards.
#pragma once

#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <cmath>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/collectives.h"
#include "lockstep/mesh/mesh.h"
#include "lockstep/parallel/shard/fully_shard.h"
#include "tests/support/models.h"
#include "tests/support/sampling.h"

namespace lockstep::test {

enum class Optimizer { sgd, adamw };

inline std::unique_ptr<torch::optim::Optimizer> make_optimizer(
    Optimizer kind, const std::vector<at::Tensor>& parameters) {
  if (kind == Optimizer::sgd)
    return std::make_unique<torch::optim::SGD>(parameters, torch::optim::SGDOptions(0.05));
  return std::make_unique<torch::optim::AdamW>(parameters, torch::optim::AdamWOptions(1e-3));
}

struct ShardCurve {
  std::vector<double> losses, norms;
  std::vector<at::Tensor> weights;  // at the end, whole, in the model's order
};

inline const int kShardSteps = tests_all() ? 20 : 6;
constexpr double kClip = 0.5;

// torch's own takes the norm in float32, whose last bits AdamW makes visible.
inline double clip_model(torch::nn::Module& model) {
  double squares = 0;
  for (const at::Tensor& parameter : model.parameters()) {
    if (parameter.grad().defined())
      squares += parameter.grad().to(at::kDouble).square().sum().item<double>();
  }
  const double norm = std::sqrt(squares), factor = kClip / (norm + 1e-6);
  if (factor >= 1) return norm;
  for (const at::Tensor& parameter : model.parameters()) {
    if (parameter.grad().defined()) parameter.grad().mul_(factor);
  }
  return norm;
}

// One process without Lockstep, `micro_batches` after each other.
template <class Task>
ShardCurve train_whole(int micro_batches, Optimizer kind, int steps = kShardSteps) {
  typename Task::Model model = Task::make(1);
  const auto optimizer = make_optimizer(kind, model->parameters());
  ShardCurve curve;
  for (int step = 0; step < steps; ++step) {
    optimizer->zero_grad();
    double sum = 0;
    for (int i = 0; i < micro_batches; ++i) {
      const Batch batch = Task::batch(step * micro_batches + i);
      const at::Tensor loss = Task::loss(model->forward(batch.input), batch);
      (loss / micro_batches).backward();
      sum += loss.template item<double>();
    }
    for (at::Tensor& parameter : model->parameters()) {
      if (parameter.grad().defined() && parameter.grad().is_sparse())
        parameter.mutable_grad() = parameter.grad().to_dense();
    }
    curve.norms.push_back(clip_model(*model));
    optimizer->step();
    curve.losses.push_back(sum / micro_batches);
  }
  for (const at::Tensor& parameter : model->parameters())
    curve.weights.push_back(parameter.detach().clone());
  return curve;
}

// Shards submodules of a model before it is sharded itself.
using ShardInside = std::function<void(torch::nn::Module&)>;

// The same micro-batches over the ranks of a mesh; each rank takes neighbours.
template <class Task>
ShardCurve train_sharded(const mesh::Mesh& mesh, int micro_batches, Optimizer kind,
                         const parallel::FullyShardOptions& options, int steps = kShardSteps,
                         const ShardInside& shard_inside = nullptr) {
  // Different weights everywhere: all get rank 0's.
  typename Task::Model model = Task::make(static_cast<uint64_t>(1 + mesh.rank()));
  if (shard_inside) shard_inside(*model);
  auto sharded = parallel::fully_shard(*model, mesh, options);
  const auto optimizer = make_optimizer(kind, sharded.parameters());
  const comm::Group group = mesh.axes().size() > 1 ? mesh.flatten() : mesh.group();
  const int mine = micro_batches / mesh.size();
  ShardCurve curve;
  for (int step = 0; step < steps; ++step) {
    if (step % 2 == 0) {
      optimizer->zero_grad();
    } else {  // what zero_grad does by default in torch 2
      for (const at::Tensor& parameter : sharded.parameters()) parameter.mutable_grad().reset();
    }
    const at::Tensor sum = at::zeros({1}, at::kDouble);
    for (int i = 0; i < mine; ++i) {
      const Batch batch = Task::batch(step * micro_batches + group.rank() * mine + i);
      std::optional<parallel::NoSyncShards> no_sync;
      if (i + 1 < mine) no_sync.emplace(sharded.no_sync());
      const at::Tensor loss = Task::loss(model->forward(batch.input), batch);
      (loss / mine).backward();
      sum.add_(loss.template item<double>());
    }
    curve.norms.push_back(sharded.clip_grad_norm_(kClip));
    optimizer->step();
    comm::all_reduce(sum, group).wait();
    curve.losses.push_back(sum.item<double>() / micro_batches);
  }
  for (const auto& [name, tensor] : sharded.full_state_dict()) {
    if (model->named_parameters().contains(name)) curve.weights.push_back(tensor);
  }
  return curve;
}

}  // namespace lockstep::test
