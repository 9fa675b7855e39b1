// SPDX-License-Identifier: Apache-2.0
// What the tests of sharding share: a model that can be watched, and ranks that may fail.
#pragma once

#include <torch/nn/modules/linear.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/core/error.h"
#include "lockstep/parallel/shard/fully_shard.h"
#include "tests/support/models.h"

namespace lockstep::test {

using Strategy = parallel::ShardingStrategy;

// Square linear layers, used in an order of choice. `probe` is called after each layer's forward
// and, on the way back, before each layer's backward.
class LayersImpl : public torch::nn::Module {
 public:
  explicit LayersImpl(int64_t count = 4) {
    for (int64_t i = 0; i < count; ++i) {
      layers.push_back(
          register_module("layer" + std::to_string(i), torch::nn::Linear(kWidth, kWidth)));
      order.push_back(static_cast<size_t>(i));
    }
    fill_parameters(*this, 1);
  }

  at::Tensor forward(at::Tensor x) {  // (B, kWidth) -> (B, kWidth)
    for (const size_t layer : order) {
      x = at::tanh(layers[layer](x));
      if (!probe) continue;
      probe(layer, false);
      if (x.requires_grad()) {
        x.register_hook([this, layer](const at::Tensor& gradient) {
          probe(layer, true);
          return gradient;
        });
      }
    }
    return x;
  }

  static constexpr int64_t kWidth = 32;
  std::vector<torch::nn::Linear> layers;
  std::vector<size_t> order;
  std::function<void(size_t layer, bool backward)> probe;
};
TORCH_MODULE(Layers);

struct LayersTask {
  using Model = Layers;
  static Layers make(uint64_t seed = 0) {
    Layers model;
    fill_parameters(*model, seed);
    return model;
  }
  // The gradient of the input is wanted, so that every weight is used on the way back.
  static Batch batch(int64_t index) {
    const at::Tensor numbers =
        at::arange(8 * LayersImpl::kWidth, at::kFloat).view({8, LayersImpl::kWidth});
    return {at::sin(numbers * (1 + 0.01 * static_cast<double>(index))).set_requires_grad(true),
            at::cos(numbers)};
  }
  static at::Tensor loss(const at::Tensor& output, const Batch& batch) {
    return at::mse_loss(output, batch.target);
  }
};

// Every weight is a unit; biases are whole.
inline parallel::FullyShardOptions weights_only(Strategy strategy = Strategy::full_shard) {
  return {.strategy = strategy, .units = parallel::BySize{1}, .min_num_params = 100};
}

// What the ranks threw, as threads; nothing where they did not.
inline std::vector<std::string> errors_of(int ranks, const std::function<void(comm::Group)>& body,
                                          comm::InitOptions options = {.backend = "thread"}) {
  std::vector<std::string> errors(static_cast<size_t>(ranks));
  comm::run_threads(
      ranks,
      [&](comm::Group group) {
        try {
          body(group);
        } catch (const Error& error) {
          errors[static_cast<size_t>(group.rank())] = error.what();
        }
      },
      std::move(options));
  return errors;
}

// What the call throws, if that is an Error; nothing otherwise.
template <class Call>
std::string error_of(Call call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

inline std::map<std::string, at::Tensor> by_name(const std::vector<optim::NamedTensor>& tensors) {
  std::map<std::string, at::Tensor> all;
  for (const auto& [name, tensor] : tensors) all.emplace(name, tensor);
  return all;
}

inline double distance(const at::Tensor& a, const at::Tensor& b) {
  return (a.detach().to(at::kDouble) - b.detach().to(at::kDouble)).abs().max().item<double>();
}

inline void backward(Layers model, int64_t index) {
  const Batch batch = LayersTask::batch(index);
  LayersTask::loss(model->forward(batch.input).to(at::kFloat), batch).backward();
}

// Those that one group can have.
inline constexpr Strategy kStrategies[]{Strategy::full_shard, Strategy::shard_grad_op,
                                        Strategy::optimizer, Strategy::no_shard};

}  // namespace lockstep::test
