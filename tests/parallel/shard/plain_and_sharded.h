// SPDX-License-Identifier: Apache-2.0
// Plain and sharded models side by side. All ranks see the same input, so the average of their
// gradients is the gradient: everything can be compared bit for bit.
#pragma once

#include <torch/nn/module.h>
#include <torch/optim/sgd.h>
#include <torch/utils.h>

#include <algorithm>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/parallel/shard/fully_shard.h"
#include "lockstep/parallel/shard/sharded_model_state.h"

namespace lockstep::test {

// Failures on thread ranks end the others, and run_threads rethrows the first.
inline void require(bool condition, const std::string& what) {
  if (!condition) throw std::runtime_error(what);
}

inline void require_same(const at::Tensor& actual, const at::Tensor& expected,
                         const std::string& what) {
  require(actual.defined() == expected.defined(),
          what + (actual.defined() ? " is defined" : " is not defined"));
  if (!actual.defined()) return;
  require(actual.sizes() == expected.sizes(), what + " has another shape");
  if (at::equal(actual, expected)) return;
  const at::Tensor off = (actual.to(at::kDouble) - expected.to(at::kDouble)).abs().max();
  throw std::runtime_error(what + " differs by up to " + std::to_string(off.item<double>()));
}

// ---- values that do not depend on the rank, the thread or the device ----

inline at::Tensor numbers(at::IntArrayRef sizes, uint64_t seed) {
  at::Generator generator = at::detail::createCPUGenerator(seed);
  return at::empty(sizes).uniform_(-1, 1, generator);
}

inline at::Tensor indices(at::IntArrayRef sizes, int64_t below, uint64_t seed) {
  at::Generator generator = at::detail::createCPUGenerator(seed);
  return at::randint(below, sizes, generator, at::kLong);
}

inline void fill(torch::nn::Module& model, uint64_t seed) {
  const at::NoGradGuard no_grad;
  for (const at::Tensor& parameter : model.parameters())
    parameter.copy_(numbers(parameter.sizes(), ++seed));
}

// Once each, also those that are registered twice.
inline std::vector<at::Tensor> parameters_of(const torch::nn::Module& model) {
  std::vector<at::Tensor> unique;
  for (const at::Tensor& parameter : model.parameters()) {
    if (std::none_of(unique.begin(), unique.end(),
                     [&](const at::Tensor& other) { return other.is_same(parameter); }))
      unique.push_back(parameter);
  }
  return unique;
}

// Every element of the output has its own weight.
inline at::Tensor loss_of(const at::Tensor& output) {
  const at::Tensor flat = output.to(at::kFloat).flatten();
  const at::Tensor weights = at::linspace(-1, 1, flat.numel(), flat.options());
  return (flat * weights + flat.square()).sum();
}

// ---- comparing ----

// The rows that a shard has of a whole tensor.
inline at::Tensor part_of(const layout::Placement& placement, at::Tensor whole) {
  if (whole.dim() == 0) whole = whole.reshape({1});
  for (int64_t dim = 0; dim < whole.dim(); ++dim) {
    const layout::Range range = placement.slice.ranges[static_cast<size_t>(dim)];
    whole = whole.narrow(dim, range.begin, range.size());
  }
  return whole;
}

// The gradients that the optimizer finds on this rank, against the whole ones of the plain model. A
// parameter without gradient counts as zero if it shares its shard with others.
inline void require_same_gradients(const parallel::ShardedModel& sharded,
                                   const torch::nn::Module& plain) {
  const auto expected = plain.named_parameters();
  std::map<std::string, int64_t> num_seen;
  for (const auto& [name, tensor, parts] : sharded.named_parameters()) {
    bool any = false;
    for (const auto& [placement, part] : sharded.parts_of(name, tensor)) {
      any = any || expected[placement.name].grad().defined();
      num_seen[placement.name] += part.numel();
    }
    require(tensor.grad().defined() == any,
            "gradient of " + name + (any ? " is missing" : " is there"));
    if (!any) continue;
    for (const auto& [placement, part] : sharded.parts_of(name, tensor.grad())) {
      const at::Tensor& parameter = expected[placement.name];
      at::Tensor gradient = parameter.grad();
      if (!gradient.defined()) gradient = at::zeros_like(parameter);
      if (gradient.is_sparse()) gradient = gradient.to_dense();
      gradient = part_of(placement, gradient).reshape({-1}).to(part.device());
      const at::Tensor mine = part.is_sparse() ? part.to_dense() : part;  // on one rank
      require_same(mine.reshape({-1}), gradient, "gradient of " + placement.name);
    }
  }
  for (const auto& [placement, part] : sharded.sharded_state_dict()) {
    const at::Tensor* parameter = expected.find(placement.name);
    if (parameter != nullptr && parameter->requires_grad())
      require(num_seen[placement.name] == part.numel(), placement.name + " is not optimized");
  }
}

// Collective.
inline void require_same_state(const parallel::ShardedModel& sharded,
                               const torch::nn::Module& plain) {
  const auto parameters = plain.named_parameters(), buffers = plain.named_buffers();
  size_t num_compared = 0;
  for (const auto& [name, tensor] : sharded.full_state_dict()) {
    const at::Tensor* expected = parameters.find(name);
    if (expected == nullptr) expected = buffers.find(name);
    require(expected != nullptr, "the plain model has no " + name);
    require_same(tensor, expected->detach().cpu(), name);
    ++num_compared;
  }
  require(num_compared == parameters_of(plain).size() + buffers.size(), "a tensor is missing");
}

// SGD adds sparse gradients one by one, a shard's are summed first.
inline void make_gradients_dense(const torch::nn::Module& model) {
  for (const at::Tensor& parameter : model.parameters()) {
    if (parameter.grad().defined() && parameter.grad().is_sparse())
      parameter.mutable_grad() = parameter.grad().to_dense();
  }
}

// Powers of two: the product with the gradient is exact, fused or not.
inline torch::optim::SGD make_sgd(const std::vector<at::Tensor>& parameters) {
  return torch::optim::SGD(parameters, torch::optim::SGDOptions(0.0625).momentum(0.5));
}

inline void drop_gradients(const std::vector<at::Tensor>& parameters) {
  for (const at::Tensor& parameter : parameters) parameter.mutable_grad().reset();
}

// ---- how it is sharded ----

struct Sharding {
  std::string name;
  parallel::FullyShardOptions options;
  bool drops = false;  // every unit is gone after every operator
  int steps = 3;
  std::string backend = "thread";
};

inline parallel::FullyShardOptions shard_all(parallel::UnitPolicy units = parallel::BySize{1}) {
  return {.units = std::move(units), .min_num_params = 1};
}

inline parallel::ShardedModel shard(torch::nn::Module& model, const comm::Group& group,
                                    const Sharding& sharding) {
  auto sharded = parallel::fully_shard(model, group, sharding.options);
  if (sharded.shared()->engine) sharded.shared()->engine->units().drop_always(sharding.drops);
  return sharded;
}

}  // namespace lockstep::test
