// SPDX-License-Identifier: Apache-2.0
// Modules whose graphs are unlike each other, for tests of a backward in two halves.
#pragma once

#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn.h>
#include <torch/utils.h>

#include <array>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/parallel/data/ddp.h"
#include "lockstep/parallel/pipeline/layer.h"
#include "lockstep/parallel/recompute/recompute.h"

namespace lockstep::test {

using parallel::Tensors;

inline at::Tensor random(at::IntArrayRef sizes, uint64_t seed) {
  return at::randn(sizes, at::detail::createCPUGenerator(seed));
}

// ---- memory, seen from outside ----

using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

inline WeakStorage weak(const at::Tensor& tensor) {
  return WeakStorage(
      c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(tensor.storage().unsafeGetStorageImpl()));
}

struct Marks {
  std::vector<WeakStorage> storages;

  WeakStorage& operator[](size_t index) {
    while (storages.size() <= index) storages.emplace_back(c10::intrusive_ptr<c10::StorageImpl>{});
    return storages[index];
  }
};

// Doubles, and saves a tensor that nothing else holds.
struct Marked : torch::autograd::Function<Marked> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            Marks* marks, int64_t index) {
    const at::Tensor saved = at::full({1}, 2.0);
    (*marks)[static_cast<size_t>(index)] = weak(saved);
    context->save_for_backward({saved});
    return x * 2;
  }
  static Tensors backward(torch::autograd::AutogradContext* context, const Tensors& gradients) {
    return {gradients[0] * context->get_saved_variables()[0], at::Tensor(), at::Tensor()};
  }
};

// A matmul by hand: a node that is not torch's own, with an input and a parameter.
struct OwnLinear : torch::autograd::Function<OwnLinear> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            const at::Tensor& weight) {
    context->save_for_backward({x, weight});
    return at::matmul(x, weight.t());
  }
  static Tensors backward(torch::autograd::AutogradContext* context, const Tensors& gradients) {
    const auto saved = context->get_saved_variables();
    return {at::matmul(gradients[0], saved[1]), at::matmul(gradients[0].t(), saved[0])};
  }
};

// ---- the cases ----

struct SplitCaseModule : torch::nn::Module {
  at::Tensor gain = register_parameter("gain", at::full({1}, 1.25));
};

struct SplitCase {
  std::string name;
  std::shared_ptr<SplitCaseModule> module = std::make_shared<SplitCaseModule>();
  std::function<Tensors(const Tensors&)> forward = {};
  Tensors inputs = {};
};

class SplitCases {
 public:
  // `use` is given the module and the inputs, and returns tensors in any form.
  template <class Module, class Use>
  void add(const std::string& name, Module module, Tensors inputs, Use use) {
    SplitCase split_case{.name = name};
    split_case.module->register_module("module", module);
    split_case.inputs = std::move(inputs);
    split_case.forward = [module, use](const Tensors& in) mutable {
      Tensors out;
      parallel::detail::collect_tensors(use(module, in), out);
      return out;
    };
    all_.push_back(std::move(split_case));
  }
  template <class Module>
  void add(const std::string& name, Module module, Tensors inputs) {
    add(name, module, std::move(inputs),
        [](Module& m, const Tensors& in) { return m->forward(in[0]); });
  }

  std::vector<SplitCase> take() { return std::move(all_); }

 private:
  std::vector<SplitCase> all_;
};

inline void add_layers(SplitCases& cases) {
  using namespace torch::nn;
  const at::Tensor x = random({3, 4}, 1), sequence = random({5, 3, 4}, 2);
  cases.add("linear", Linear(4, 5), {x});
  cases.add("linear of three dimensions", Linear(4, 5), {sequence});
  cases.add("linear without bias", Linear(LinearOptions(4, 5).bias(false)), {sequence});
  cases.add("layer norm", LayerNorm(LayerNormOptions({4})), {sequence});
  cases.add("convolution", Sequential(Conv2d(2, 3, 3), Functional(at::tanh), Conv2d(3, 2, 2)),
            {random({2, 2, 6, 6}, 3)});
  cases.add("batch norm", BatchNorm1d(4), {x});
  cases.add("embedding", Embedding(7, 4), {x, at::tensor({1, 6, 1}, at::kLong)},
            [](Embedding& m, const Tensors& in) { return in[0] * m(in[1]); });
  cases.add("lstm", LSTM(LSTMOptions(4, 3).num_layers(2).bidirectional(true)), {sequence});
  cases.add("gru", GRU(GRUOptions(4, 3).num_layers(2)), {sequence});
  cases.add("attention", MultiheadAttention(MultiheadAttentionOptions(4, 2)),
            {sequence, random({5, 3, 4}, 4)}, [](MultiheadAttention& m, const Tensors& in) {
              return m->forward(in[0], in[1], in[1]);
            });
  cases.add("encoder", TransformerEncoderLayer(TransformerEncoderLayerOptions(4, 2).dropout(0)),
            {sequence});
  cases.add("deep",
            Sequential(Linear(4, 4), Functional(at::sigmoid), LayerNorm(LayerNormOptions({4})),
                       Linear(4, 6), Functional(at::silu), Linear(6, 4)),
            {x});
}

inline void add_shapes(SplitCases& cases) {
  using torch::nn::Linear;
  const at::Tensor x = random({3, 4}, 1), y = random({3, 4}, 2);
  const auto add = [&](const std::string& name, Tensors inputs, auto use) {
    cases.add(name, Linear(4, 4), std::move(inputs), use);
  };
  add("a weight used twice", {x},
      [](Linear& m, const Tensors& in) { return m(at::tanh(m(in[0]))); });
  add("a computed weight used twice", {x}, [](Linear& m, const Tensors& in) {
    const at::Tensor& v = m->weight;
    const at::Tensor weight = m->bias.unsqueeze(1) * v / v.norm(2, {1}, true);
    return at::linear(at::tanh(at::linear(in[0], weight)), weight);
  });
  add("a weight computed once for each use", {x}, [](Linear& m, const Tensors& in) {
    return at::linear(at::tanh(at::linear(in[0], m->weight.exp())), m->weight.sin());
  });
  add("a node of one's own", {x}, [](Linear& m, const Tensors& in) {
    return OwnLinear::apply(OwnLinear::apply(in[0], m->weight).tanh(), m->weight.exp()) + m->bias;
  });
  add("chunk", {x}, [](Linear& m, const Tensors& in) {
    const auto parts = m(in[0]).chunk(3, 1);
    return parts[0] * parts[1].tanh();
  });
  add("unbind", {x}, [](Linear& m, const Tensors& in) {
    const auto rows = m(in[0]).unbind();
    return Tensors{at::dot(rows[0], m->bias), rows[2] * 3};  // one row is not used
  });
  add("chunks of a weight", {x}, [](Linear& m, const Tensors& in) {
    const auto parts = m->weight.chunk(2);
    return at::linear(in[0], parts[0]) * at::linear(in[0].exp(), parts[1]);
  });
  add("an output of parameters alone", {x}, [](Linear& m, const Tensors& in) {
    return Tensors{m(in[0]), m->weight.exp(), m->bias};
  });
  add("parameters alone", {x},
      [](Linear& m, const Tensors&) { return Tensors{m->weight.exp() * m->bias}; });
  add("inputs passed through", {x, y}, [](Linear& m, const Tensors& in) {
    return Tensors{in[0], m(in[0]), in[1]};
  });
  add("nothing but the input", {x}, [](Linear&, const Tensors& in) { return in; });
  add("no parameters on the way", {x}, [](Linear&, const Tensors& in) { return in[0].tanh(); });
  add("branches", {x}, [](Linear& m, const Tensors& in) {
    const at::Tensor h = m(in[0]);
    return in[0] + h.tanh() * m(h.sigmoid() + in[0]) + h;
  });
  add("several inputs and outputs", {x, y}, [](Linear& m, const Tensors& in) {
    const at::Tensor a = m(in[0] * in[1]), b = m(in[1]);
    return Tensors{a + b, b.tanh(), a * in[0], b};
  });
  add("an input that is not used", {x, y}, [](Linear& m, const Tensors& in) { return m(in[1]); });
  add("an input without gradient", {x, at::tensor({0, 2, 1}, at::kLong)},
      [](Linear& m, const Tensors& in) { return m(in[0].index_select(0, in[1])); });
  add("the same output twice", {x}, [](Linear& m, const Tensors& in) {
    const at::Tensor h = m(in[0]);
    return Tensors{h, h};
  });
  add("views and writes", {x}, [](Linear& m, const Tensors& in) {
    at::Tensor h = m(in[0]).clone();
    h.narrow(1, 0, 2).mul_(m->bias.narrow(0, 0, 2));
    return h.t().reshape({2, 6});
  });
  add("recomputed", {x}, [](Linear& m, const Tensors& in) {
    auto block = [m](const at::Tensor& value) mutable {
      return parallel::recompute([m, value]() mutable { return value + at::gelu(m(value)); });
    };
    return block(block(in[0]));
  });
  for (const bool weight : {true, false}) {
    const Linear frozen(4, 4);
    (weight ? frozen->weight : frozen->bias).set_requires_grad(false);
    cases.add(weight ? "a frozen weight" : "a frozen bias", frozen, {x});
  }
  const Linear frozen(4, 4);
  for (at::Tensor& parameter : frozen->parameters()) parameter.set_requires_grad(false);
  cases.add("frozen", frozen, {x});
}

inline std::vector<SplitCase> split_cases() {
  torch::manual_seed(1);
  SplitCases cases;
  add_layers(cases);
  add_shapes(cases);
  return cases.take();
}

}  // namespace lockstep::test
