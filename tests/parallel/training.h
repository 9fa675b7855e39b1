// SPDX-License-Identifier: Apache-2.0
// One training loop for all ways to spread it, so that curves can be compared.
#pragma once

#include <torch/optim/sgd.h>

#include <functional>
#include <string>
#include <vector>

#include "lockstep/comm/collectives.h"
#include "lockstep/parallel/data/ddp.h"
#include "tests/support/models.h"
#include "tests/support/sampling.h"

namespace lockstep::test {

struct Curve {
  std::vector<double> losses;
  at::Tensor weights;  // all parameters at the end, flat
};

template <class Module>
Curve finish(Curve curve, Module& model) {
  std::vector<at::Tensor> flat;
  for (const at::Tensor& parameter : model.parameters())
    flat.push_back(parameter.detach().flatten().clone());
  curve.weights = at::cat(flat);
  return curve;
}

inline const int kSteps = tests_all() ? 20 : 6;
constexpr double kLearningRate = 0.05;

// One process that runs `micro_batches` after each other and averages them, without Lockstep.
template <class Task>
Curve train_alone(int micro_batches) {
  typename Task::Model model = Task::make(1);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(kLearningRate));
  Curve curve;
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    double sum = 0;
    for (int i = 0; i < micro_batches; ++i) {
      const Batch batch = Task::batch(step * micro_batches + i);
      const at::Tensor loss = Task::loss(model->forward(batch.input), batch);
      (loss / micro_batches).backward();
      sum += loss.template item<double>();
    }
    optimizer.step();
    curve.losses.push_back(sum / micro_batches);
  }
  return finish(std::move(curve), *model);
}

// The same micro-batches over the ranks of a group; each rank takes neighbours.
template <class Task>
Curve train_ddp(const comm::Group& group, int micro_batches, parallel::DdpOptions options) {
  // Different weights everywhere: the wrapper has to make them rank 0's.
  auto ddp =
      parallel::ddp(Task::make(static_cast<uint64_t>(1 + group.rank())), group, std::move(options));
  auto& model = ddp.module();
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(kLearningRate));
  const int mine = micro_batches / group.size();
  Curve curve;
  for (int step = 0; step < kSteps; ++step) {
    if (step % 2 == 0) {
      optimizer.zero_grad();
    } else {  // what zero_grad does by default in torch 2
      for (at::Tensor& parameter : model->parameters()) parameter.mutable_grad().reset();
    }
    const at::Tensor sum = at::zeros({1}, at::kDouble);
    for (int i = 0; i < mine; ++i) {
      const Batch batch = Task::batch(step * micro_batches + group.rank() * mine + i);
      std::optional<parallel::NoSync> no_sync;
      if (i + 1 < mine) no_sync.emplace(ddp.no_sync());
      const at::Tensor loss = Task::loss(ddp.forward(batch.input), batch);
      (loss / mine).backward();
      sum.add_(loss.template item<double>());
    }
    optimizer.step();
    comm::all_reduce(sum, group).wait();
    curve.losses.push_back(sum.item<double>() / micro_batches);
  }
  return finish(std::move(curve), *model);
}

// What is wrong with `actual`, or nothing.
inline std::string difference(const Curve& actual, const Curve& expected, double tolerance) {
  for (size_t step = 0; step < expected.losses.size(); ++step) {
    const double a = actual.losses[step], e = expected.losses[step];
    if (!(std::abs(a - e) <= tolerance * std::abs(e)))
      return "loss of step " + std::to_string(step) + " is " + std::to_string(a) + ", not " +
             std::to_string(e);
  }
  const double largest = (actual.weights - expected.weights).abs().max().item<double>();
  if (!(largest <= tolerance)) return "weights differ by " + std::to_string(largest);
  return "";
}

}  // namespace lockstep::test
