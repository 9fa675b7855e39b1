// SPDX-License-Identifier: Apache-2.0
// A backward in two halves gives what one in one gives, of any module.
#include "lockstep/parallel/pipeline/split_backward.h"

#include <gtest/gtest.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/parallel/recompute/recompute.h"
#include "tests/parallel/pipeline/split_backward_cases.h"

namespace lockstep::test {
namespace {

using parallel::detail::SplitBackward;
using torch::autograd::Edge;
using torch::autograd::impl::grad_accumulator;
using torch::autograd::impl::gradient_edge;

class CountingHook final : public torch::autograd::FunctionPostHook {
 public:
  explicit CountingHook(int& count) : count_(count) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list&) override {
    ++count_;
    return outputs;
  }

 private:
  int& count_;
};

struct Roots {
  std::vector<Edge> edges;
  Tensors gradients;
};

Roots roots_of(const Tensors& outputs) {
  Roots roots;
  for (const at::Tensor& output : outputs) {
    if (!output.requires_grad()) continue;
    roots.edges.push_back(gradient_edge(output));
    roots.gradients.push_back(random(output.sizes(), 50 + roots.edges.size()));
  }
  return roots;
}

std::vector<Edge> edges_of(const Tensors& tensors) {
  std::vector<Edge> edges;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.requires_grad()) edges.push_back(gradient_edge(tensor));
  }
  return edges;
}

std::map<std::string, at::Tensor> take_gradients(const torch::nn::Module& module) {
  std::map<std::string, at::Tensor> found;
  for (const auto& item : module.named_parameters())
    found[item.key()] = std::exchange(item.value().mutable_grad(), at::Tensor());
  return found;
}

void expect_same(const at::Tensor& found, const at::Tensor& expected, const std::string& what) {
  ASSERT_EQ(found.defined(), expected.defined()) << what;
  if (found.defined()) {
    EXPECT_TRUE(at::equal(found, expected)) << what;
  }
}

// Where the first half ends.
enum class Entry { inputs, inside };

// Inside, the inputs need no gradient, but what a gain makes of them does.
struct Passed {
  Tensors inputs, entries, outputs;
};

Passed pass(const SplitCase& split_case, Entry entry) {
  Passed passed;
  for (const at::Tensor& value : split_case.inputs) {
    passed.inputs.push_back(value.detach().clone().set_requires_grad(entry == Entry::inputs &&
                                                                     value.is_floating_point()));
    const bool gains = entry == Entry::inside && value.is_floating_point();
    passed.entries.push_back(gains ? passed.inputs.back() * split_case.module->gain
                                   : passed.inputs.back());
  }
  passed.outputs = split_case.forward(passed.entries);
  return passed;
}

void compare_split(const SplitCase& split_case, Entry entry) {
  SCOPED_TRACE(split_case.name + (entry == Entry::inside ? ", inside" : ""));
  const Passed plain = pass(split_case, entry);
  for (const at::Tensor& tensor : plain.entries) {
    if (tensor.requires_grad()) tensor.retain_grad();
  }
  Roots roots = roots_of(plain.outputs);
  ASSERT_FALSE(roots.edges.empty());
  torch::autograd::Engine::get_default_engine().execute(roots.edges, roots.gradients, false, false,
                                                        true, {});
  const auto expected = take_gradients(*split_case.module);

  std::map<std::string, int> fired;
  for (const auto& item : split_case.module->named_parameters()) {
    if (item.value().requires_grad())
      grad_accumulator(item.value())
          ->add_post_hook(std::make_unique<CountingHook>(fired[item.key()]));
  }
  Passed split = pass(split_case, entry);
  roots = roots_of(split.outputs);
  const std::vector<Edge> edges = edges_of(split.entries);
  split.outputs.clear();
  SplitBackward backward(std::move(roots.edges), std::move(roots.gradients), edges);
  ASSERT_EQ(backward.input_gradients().size(), edges.size());
  size_t next = 0;
  for (size_t i = 0; i < split.entries.size(); ++i) {
    if (split.entries[i].requires_grad())
      expect_same(backward.input_gradients()[next++], plain.entries[i].grad(),
                  "input " + std::to_string(i));
  }
  for (const auto& item : split_case.module->named_parameters()) {
    EXPECT_FALSE(item.value().grad().defined()) << item.key() << " after the first half";
    EXPECT_EQ(fired[item.key()], 0) << item.key();
  }
  const bool has_weights = std::any_of(expected.begin(), expected.end(),
                                       [](const auto& item) { return item.second.defined(); });
  EXPECT_EQ(backward.run_weights(), has_weights);
  EXPECT_EQ(backward.kept_bytes(), 0u);
  for (const at::Tensor& input : split.inputs) EXPECT_FALSE(input.grad().defined());
  for (const auto& [name, gradient] : take_gradients(*split_case.module)) {
    expect_same(gradient, expected.at(name), name);
    EXPECT_EQ(fired[name], expected.at(name).defined() ? 1 : 0) << name;
  }
}

TEST(SplitBackward, GivesTheBitsOfOneBackward) {
  for (const Entry entry : {Entry::inputs, Entry::inside}) {
    for (const SplitCase& split_case : split_cases()) {
      compare_split(split_case, entry);
      if (HasFatalFailure()) return;
    }
  }
}

// Entries below each other, or the same twice: what arrives at one must not be counted again.
TEST(SplitBackward, EntriesThatDependOnEachOther) {
  torch::nn::Linear front(3, 4), back(4, 2);
  const auto head = [&](const Tensors& in) { return back(in[0] * 2 + in[1].tanh()).sum(); };
  using Front = std::function<Tensors(const at::Tensor&)>;
  const std::vector<std::pair<std::string, Front>> fronts = {
      {"twice",
       [&](const at::Tensor& h) {
         return Tensors{h, h};
       }},
      {"a function of the other",
       [&](const at::Tensor& h) {
         return Tensors{h, h.exp()};
       }},
      {"the other way round",
       [&](const at::Tensor& h) {
         return Tensors{h.exp(), h};
       }},
      {"with a parameter in between",
       [&](const at::Tensor& h) {
         return Tensors{h, h * front->bias};
       }},
      {"parts of one node", [&](const at::Tensor& h) { return h.chunk(2); }}};
  for (const auto& [name, make] : fronts) {
    const auto gradients = [&](bool splits) {
      const Tensors entries = make(front(random({2, 3}, 1)));
      const at::Tensor loss = name == "parts of one node"
                                  ? back(at::cat({entries[0], entries[1] * 2})).sum()
                                  : head(entries);
      if (splits) {
        SplitBackward backward({gradient_edge(loss)}, {at::ones_like(loss)}, edges_of(entries));
        EXPECT_FALSE(front->weight.grad().defined());
        backward.run_weights();
      } else {
        loss.backward();
      }
      Tensors found;
      for (const at::Tensor& parameter : {front->weight, front->bias, back->weight, back->bias})
        found.push_back(std::exchange(parameter.mutable_grad(), at::Tensor()));
      return found;
    };
    const Tensors expected = gradients(false), found = gradients(true);
    for (size_t i = 0; i < expected.size(); ++i)
      expect_same(found[i], expected[i], name + ", parameter " + std::to_string(i));
  }
}

// What was saved in `Marked` nodes is seen from outside.
TEST(SplitBackward, FreesWhatIsDoneWith) {
  torch::nn::Linear first(4, 4), second(4, 4);
  const at::Tensor input = random({3, 4}, 1).set_requires_grad(true);
  Marks marks;
  at::Tensor weight = Marked::apply(second->weight, &marks, 1);  // second half only
  at::Tensor hidden = Marked::apply(first(input), &marks, 0);    // first half only
  at::Tensor output = at::linear(hidden, weight).sum();
  std::vector<Edge> roots{gradient_edge(output)};
  output.reset();
  hidden.reset();
  weight.reset();
  ASSERT_FALSE(marks[0].expired());
  ASSERT_FALSE(marks[1].expired());
  SplitBackward backward(std::move(roots), {at::ones({})}, {gradient_edge(input)});
  EXPECT_TRUE(marks[0].expired());
  EXPECT_FALSE(marks[1].expired());
  backward.run_weights();
  EXPECT_TRUE(marks[1].expired());
}

// The input of a layer is needed until its weight has its gradient, and no longer.
TEST(SplitBackward, ActivationsLiveUntilTheSecondHalf) {
  torch::nn::Linear layer(4, 4);
  const at::Tensor input = random({3, 4}, 1).set_requires_grad(true);
  at::Tensor hidden = input.tanh();
  const auto storage = weak(hidden);
  at::Tensor output = layer(hidden).sum();
  hidden.reset();
  std::vector<Edge> roots{gradient_edge(output)};
  output.reset();
  SplitBackward backward(std::move(roots), {at::ones({})}, {gradient_edge(input)});
  EXPECT_FALSE(storage.expired());
  backward.run_weights();
  EXPECT_TRUE(storage.expired());
}

// One gradient for each linear layer: that of what it gave.
TEST(SplitBackward, KeptBytes) {
  torch::nn::Linear first(4, 5), second(5, 2);
  const at::Tensor input = random({3, 4}, 1).set_requires_grad(true);
  const at::Tensor output = second(first(input).tanh());
  SplitBackward backward({gradient_edge(output)}, {at::ones_like(output)}, {gradient_edge(input)});
  EXPECT_EQ(backward.kept_bytes(), (3 * 5 + 3 * 2) * sizeof(float));
  backward.run_weights();
  EXPECT_EQ(backward.kept_bytes(), 0u);
  EXPECT_FALSE(backward.run_weights());
}

// What it computes from is a leaf that nobody else holds, or a tensor inside the graph.
TEST(SplitBackward, RecomputesOnceForBothHalves) {
  torch::nn::Linear first(4, 5), second(5, 4);
  for (const bool is_leaf : {true, false}) {
    int calls = 0;
    const auto run = [&] {
      at::Tensor entry =
          is_leaf ? random({3, 5}, 1).set_requires_grad(true) : first(random({3, 4}, 1));
      const at::Tensor output = parallel::recompute([&calls, second, entry]() mutable {
        ++calls;
        return second(entry).sigmoid() * second(entry.tanh());
      });
      return SplitBackward({gradient_edge(output)}, {at::ones_like(output)},
                           {gradient_edge(entry)});
    };
    SplitBackward backward = run();
    EXPECT_EQ(calls, 2);
    backward.run_weights();
    EXPECT_EQ(calls, 2);
  }
}

// No way to the inputs, and no inputs at all: everything is in the second half.
TEST(SplitBackward, WithoutInputs) {
  torch::nn::Linear layer(4, 2);
  const at::Tensor unused = random({1}, 2).set_requires_grad(true);
  for (const bool has_input : {false, true}) {
    const at::Tensor output = layer(random({3, 4}, 1));
    std::vector<Edge> inputs;
    if (has_input) inputs.push_back(gradient_edge(unused));
    SplitBackward backward({gradient_edge(output)}, {at::ones_like(output)}, inputs);
    EXPECT_FALSE(layer->weight.grad().defined());
    if (has_input) {
      EXPECT_FALSE(backward.input_gradients()[0].defined());
    }
    EXPECT_TRUE(backward.run_weights());
    EXPECT_TRUE(at::equal(layer->bias.grad(), at::full({2}, 3.0)));
    take_gradients(*layer);
  }
}

}  // namespace
}  // namespace lockstep::test
