// SPDX-License-Identifier: Apache-2.0
// Torch's modules as test cases, and the one comparison that all of them must pass.
#pragma once

#include <torch/nn.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/parallel/shard/plain_and_sharded.h"

namespace lockstep::test {

// A module with what calls it; and a parameter without dimensions, which is in another unit.
class CaseModule : public torch::nn::Module {
 public:
  using Call = std::function<at::Tensor(const at::Tensor&)>;

  CaseModule() { gain_ = register_parameter("gain", at::ones({})); }
  template <class Holder>
  Holder add(const std::string& name, Holder module) {
    return register_module(name, std::move(module));
  }
  void add_parameter(const std::string& name, at::Tensor tensor) {
    register_parameter(name, std::move(tensor));
  }
  void set_call(Call call) { call_ = std::move(call); }
  at::Tensor forward(const at::Tensor& input) { return call_(input) * gain_; }

 private:
  Call call_;
  at::Tensor gain_;
};

struct ModuleCase {
  std::string name;
  std::function<void(CaseModule&)> make;
  std::function<at::Tensor(uint64_t seed)> input;
  bool trains = true;
};

// Makes one module, which is called with one tensor.
template <class Holder, class... Arguments>
std::function<void(CaseModule&)> single(Arguments... arguments) {
  return [=](CaseModule& model) {
    auto module = model.add("module", Holder(arguments...));
    model.set_call([module](const at::Tensor& x) mutable { return module(x); });
  };
}

// Its result is the first of a tuple.
template <class Holder, class... Arguments>
std::function<void(CaseModule&)> recurrent(Arguments... arguments) {
  return [=](CaseModule& model) {
    auto module = model.add("module", Holder(arguments...));
    model.set_call([module](const at::Tensor& x) mutable { return std::get<0>(module(x)); });
  };
}

inline std::function<void(CaseModule&)> make_tied(int64_t w) {
  return [w](CaseModule& model) {
    auto table = model.add("table", torch::nn::Embedding(11 * w, 6 * w));
    model.add_parameter("head", table->weight);
    model.set_call([table](const at::Tensor& x) mutable {
      return at::linear(at::tanh(table(x)), table->weight);
    });
  };
}

inline std::function<void(CaseModule&)> make_bilinear(int64_t w) {
  return [w](CaseModule& model) {
    auto module = model.add("module", torch::nn::Bilinear(6 * w, 6 * w, 3));
    model.set_call([module](const at::Tensor& x) mutable { return module(x, at::sin(x)); });
  };
}

inline std::function<void(CaseModule&)> make_cell(int64_t w) {
  return [w](CaseModule& model) {
    auto module = model.add("module", torch::nn::LSTMCell(6 * w, 5 * w));
    model.set_call([module](const at::Tensor& x) mutable {
      auto state = module(x);
      state = module(x.neg(), state);
      return at::cat({std::get<0>(state), std::get<1>(state)}, 1);
    });
  };
}

inline std::function<void(CaseModule&)> make_attention(int64_t w) {
  return [w](CaseModule& model) {
    auto module = model.add("module", torch::nn::MultiheadAttention(8 * w, 2));
    model.set_call([module](const at::Tensor& x) mutable {
      return std::get<0>(module(x, x.flip(0), x.square()));
    });
  };
}

// Parameters of two types, and some that are not trained, in one unit.
inline std::function<void(CaseModule&)> make_mixed(int64_t w) {
  return [w](CaseModule& model) {
    auto wide = model.add("wide", torch::nn::Linear(6 * w, 4 * w));
    wide->to(at::kDouble);
    auto fixed = model.add("fixed", torch::nn::Linear(4 * w, 7 * w));
    fixed->weight.set_requires_grad(false);
    model.set_call([wide, fixed](const at::Tensor& x) mutable {
      return fixed(at::tanh(wide(x.to(at::kDouble))).to(at::kFloat));
    });
  };
}

// `w` makes all of them so many times as wide.
inline std::vector<ModuleCase> module_cases(int64_t w = 1) {
  using namespace torch::nn;  // NOLINT: a list of its modules
  const auto floats = [](std::vector<int64_t> sizes) {
    return [sizes](uint64_t seed) { return numbers(sizes, seed); };
  };
  const auto words = [](std::vector<int64_t> sizes) {
    return [sizes](uint64_t seed) { return indices(sizes, 11, seed); };
  };
  return {
      {"linear", single<Linear>(6 * w, 5 * w), floats({4, 6 * w})},
      {"embedding", single<Embedding>(11 * w, 5 * w), words({3, 4})},
      {"embedding_sparse", single<Embedding>(EmbeddingOptions(11 * w, 5 * w).sparse(true)),
       words({3, 4})},
      {"embedding_bag", single<EmbeddingBag>(11 * w, 5 * w), words({3, 4})},
      {"embedding_bag_sparse",
       single<EmbeddingBag>(EmbeddingBagOptions(11 * w, 5 * w).sparse(true).mode(torch::kSum)),
       words({3, 4})},
      {"tied", make_tied(w), words({3, 4})},
      {"conv1d", single<Conv1d>(Conv1dOptions(3 * w, 5 * w, 3)), floats({2, 3 * w, 9})},
      {"conv2d", single<Conv2d>(Conv2dOptions(3 * w, 5 * w, 3)), floats({2, 3 * w, 6, 6})},
      {"conv2d_grouped", single<Conv2d>(Conv2dOptions(4 * w, 6 * w, 3).groups(2).padding(1)),
       floats({2, 4 * w, 5, 5})},
      {"conv_transpose2d",
       single<ConvTranspose2d>(ConvTranspose2dOptions(3 * w, 4 * w, 3).stride(2)),
       floats({2, 3 * w, 4, 4})},
      {"batch_norm", single<BatchNorm2d>(5 * w), floats({3, 5 * w, 4, 4})},
      {"batch_norm_eval", single<BatchNorm2d>(5 * w), floats({3, 5 * w, 4, 4}), false},
      {"layer_norm", single<LayerNorm>(LayerNormOptions({7 * w})), floats({3, 7 * w})},
      {"group_norm", single<GroupNorm>(2, 6 * w), floats({3, 6 * w, 5})},
      {"prelu", single<PReLU>(PReLUOptions().num_parameters(5 * w)), floats({3, 5 * w, 2})},
      {"bilinear", make_bilinear(w), floats({4, 6 * w})},
      {"lstm", recurrent<LSTM>(LSTMOptions(5 * w, 6 * w).num_layers(2)), floats({4, 2, 5 * w})},
      {"gru", recurrent<GRU>(GRUOptions(5 * w, 6 * w).bidirectional(true)), floats({4, 2, 5 * w})},
      {"lstm_cell", make_cell(w), floats({3, 6 * w})},
      {"attention", make_attention(w), floats({4, 2, 8 * w})},
      {"encoder",
       single<TransformerEncoderLayer>(
           TransformerEncoderLayerOptions(8 * w, 2).dim_feedforward(12 * w).dropout(0)),
       floats({4, 2, 8 * w})},
      {"mixed", make_mixed(w), floats({4, 6 * w})},
  };
}

inline std::shared_ptr<CaseModule> make_case_module(const ModuleCase& module_case,
                                                    c10::Device device) {
  auto model = std::make_shared<CaseModule>();
  module_case.make(*model);
  fill(*model, 17);
  model->train(module_case.trains);
  model->to(device);
  return model;
}

// Some steps of a plain model and of a sharded one: outputs, gradients and weights are the same.
inline void compare(const ModuleCase& module_case, const Sharding& sharding,
                    const comm::Group& group, c10::Device device = at::kCPU) {
  const auto plain = make_case_module(module_case, device),
             model = make_case_module(module_case, device);
  auto sharded = shard(*model, group, sharding);
  auto plain_sgd = make_sgd(parameters_of(*plain)), sgd = make_sgd(sharded.parameters());
  for (int step = 0; step < sharding.steps; ++step) {
    const auto seed = static_cast<uint64_t>(100 + step);
    at::Tensor plain_input = module_case.input(seed).to(device);
    at::Tensor input = plain_input.clone();
    if (input.is_floating_point()) {
      input.set_requires_grad(true);
      plain_input.set_requires_grad(true);
    }
    const at::Tensor expected = plain->forward(plain_input);
    const at::Tensor output = model->forward(input);
    require_same(output, expected, "output of step " + std::to_string(step));
    loss_of(expected).backward();
    loss_of(output).backward();
    if (input.is_floating_point()) require_same(input.grad(), plain_input.grad(), "input gradient");
    make_gradients_dense(*plain);
    require_same_gradients(sharded, *plain);
    plain_sgd.step();
    sgd.step();
    if (step % 2 == 0) {
      plain_sgd.zero_grad();
      sgd.zero_grad();
    } else {
      drop_gradients(plain->parameters());
      drop_gradients(sharded.parameters());
    }
  }
  require_same_state(sharded, *plain);
  // What was compared did come and go.
  if (sharding.drops && sharding.options.min_num_params == 1 && group.size() > 1)
    require(sharded.stats().all_gathers >= 3 * sharding.steps, "too few gathers");
}

}  // namespace lockstep::test
