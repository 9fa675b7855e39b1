// SPDX-License-Identifier: Apache-2.0
// What torch does to functions (TorchScript, functorch's transforms, forward mode), with sharded
// and offloaded parameters and with recomputed functions.
#include <ATen/functorch/BatchedTensorImpl.h>
#include <ATen/functorch/DynamicLayer.h>
#include <ATen/functorch/TensorWrapper.h>
#include <gtest/gtest.h>
#include <torch/autograd.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/jit/frontend/tracer.h>
#include <torch/jit.h>

#include <memory>
#include <vector>

#include "lockstep/parallel/recompute/recompute.h"
#include "tests/parallel/shard/pair.h"

namespace lockstep::test {
namespace {

// ---- TorchScript ----

constexpr const char* kScript = R"(
def f(x, weight, bias):
    return torch.tanh(torch.matmul(x, weight.t()) + bias)
)";

TEST(Transforms, TorchScriptUsesShardedParameters) {
  on_ranks([](const comm::Group& group) {
    Pair pair(group);
    const auto for_plain = torch::jit::compile(kScript), for_sharded = torch::jit::compile(kScript);
    // The first calls are profiled, later ones optimized.
    for (int step = 0; step < 4; ++step) {
      pair.step([&](Net& net) {
        const auto& script = &net == pair.plain.get() ? for_plain : for_sharded;
        const at::Tensor y =
            script->run_method("f", input_of(step), net.a->weight, net.a->bias).toTensor();
        return loss_of(y) + loss_of(net.forward(input_of(step)));
      });
    }
  });
}

TEST(Transforms, TorchScriptIsRecomputed) {
  const auto script = torch::jit::compile(kScript);
  const at::Tensor weight = numbers({5, 6}, 1), bias = numbers({5}, 2);
  for (int step = 0; step < 4; ++step) {
    std::vector<at::Tensor> gradients;
    for (const bool again : {false, true}) {
      const at::Tensor x = input_of(step).set_requires_grad(true);
      const auto f = [&](const at::Tensor& input) {
        return script->run_method("f", input, weight, bias).toTensor();
      };
      loss_of(again ? parallel::recompute(f, x) : f(x)).backward();
      gradients.push_back(x.grad());
    }
    // The first calls run other code than later ones, with other roundings.
    EXPECT_TRUE(at::allclose(gradients[0], gradients[1], 1e-5, 1e-6)) << step;
    if (step > 0) {
      EXPECT_TRUE(at::equal(gradients[0], gradients[1])) << step;
    }
  }
}

TEST(Transforms, TracesOfShardedParameters) {
  on_ranks([](const comm::Group& group) {
    Pair pair(group);
    const at::NoGradGuard no_grad;
    const auto traced = torch::jit::tracer::trace(
        {input_of(0), pair.model->a->weight},
        [](torch::jit::Stack inputs) -> torch::jit::Stack {
          return {at::matmul(inputs[0].toTensor(), inputs[1].toTensor().t()).tanh()};
        },
        [](const at::Tensor&) { return ""; });
    torch::jit::GraphExecutor graph(traced.first->graph, "traced");
    torch::jit::Stack stack{input_of(1), pair.model->a->weight};
    graph.run(stack);
    require_same(stack.back().toTensor(), at::matmul(input_of(1), pair.plain->a->weight.t()).tanh(),
                 "the trace's result");
  });
}

// ---- functorch ----

class Transform {
 public:
  explicit Transform(at::functorch::TransformType type, int64_t batch = 0)
      : level_(type == at::functorch::TransformType::Vmap
                   ? at::functorch::initAndPushDynamicLayer(type, batch,
                                                            at::functorch::RandomnessType::Error)
                   : at::functorch::initAndPushDynamicLayer(type, {}, {},
                                                            at::GradMode::is_enabled())) {}
  ~Transform() { at::functorch::popDynamicLayerAndDeleteMetadata(); }
  Transform(const Transform&) = delete;
  Transform& operator=(const Transform&) = delete;
  int64_t level() const { return level_; }

 private:
  int64_t level_;
};

// functorch numbers its transforms for the whole process, so threads cannot be ranks here. One rank
// whose parameters rest on the host uses the same interception.
struct TwoLayers : torch::nn::Module {
  torch::nn::Linear a{register_module("a", torch::nn::Linear(6, 8))};
  torch::nn::Linear b{register_module("b", torch::nn::Linear(8, 6))};
  TwoLayers() { fill(*this, 5); }
  at::Tensor forward(const at::Tensor& x) { return b(at::tanh(a(x))); }
};

struct Offloaded {
  std::shared_ptr<TwoLayers> plain = std::make_shared<TwoLayers>(),
                             model = std::make_shared<TwoLayers>();
  parallel::ShardedModel sharded =
      parallel::fully_shard(*model, comm::Group(),
                            {.units = parallel::BySize{1},
                             .min_num_params = 1,
                             .use_orig_params = true,
                             .offload = layout::OffloadOptions{
                                 .grads = false,
                                 .optimizer = false,
                                 .device_limit = 64 << 10,
                                 .advanced = {.strategy = layout::OffloadStrategy::extreme}}});

  // Both, and their gradients.
  template <class Use>
  void compare(const Use& use) {
    require(model->a->weight.key_set().has(c10::DispatchKey::DeferredInit),
            "nothing is intercepted");
    const at::Tensor expected = use(*plain), loss = use(*model);
    require_same(loss, expected, "the loss");
    expected.backward();
    loss.backward();
    const auto parameters = plain->named_parameters();
    for (const auto& [name, shard, parts] : sharded.named_parameters())
      require_same(shard.grad(), parameters[name].grad(), "the gradient of " + name);
  }
};

// The forward of each row by itself.
at::Tensor vmapped(TwoLayers& net, const at::Tensor& rows) {
  const Transform vmap(at::functorch::TransformType::Vmap, rows.size(0));
  const at::Tensor y = net.forward(at::functorch::addBatchDim(rows, 0, vmap.level()));
  const auto* const batched = at::functorch::maybeGetBatchedImpl(y);
  require(batched != nullptr, "the result has no batch");
  return batched->value().movedim(batched->bdim(), 0);
}

TEST(Transforms, VmapOverOffloadedParameters) {
  Offloaded both;
  both.compare([](TwoLayers& net) { return loss_of(vmapped(net, input_of(0))); });
}

// functorch's grad: the gradient of the input, while parameters are what they are.
at::Tensor input_gradient(TwoLayers& net, const at::Tensor& input) {
  const Transform grad(at::functorch::TransformType::Grad);
  const at::Tensor x = at::functorch::makeTensorWrapper(input, grad.level());
  at::functorch::setInplaceRequiresGradAllowed(true);
  x.requires_grad_(true);
  at::functorch::setInplaceRequiresGradAllowed(false);
  const at::Tensor loss = net.forward(x).square().sum();
  const at::Tensor gradient = torch::autograd::grad({loss}, {x})[0];
  const auto* const wrapper = at::functorch::maybeGetTensorWrapper(gradient);
  return wrapper == nullptr ? gradient : wrapper->value();
}

TEST(Transforms, GradTransformOverOffloadedParameters) {
  Offloaded both;
  require_same(input_gradient(*both.model, input_of(0)), input_gradient(*both.plain, input_of(0)),
               "the gradient of the input");
  both.compare([](TwoLayers& net) { return loss_of(net.forward(input_of(0))); });
}

// ---- forward mode ----

TEST(Transforms, ForwardModeOfShardedParameters) {
  const uint64_t level = torch::autograd::ForwardADLevel::get_next_idx();
  on_ranks([&](const comm::Group& group) {
    Pair pair(group);
    const auto derivative = [&](Net& net, bool of_parameter) {
      const at::Tensor x = input_of(1), tangent = input_of(2);
      at::Tensor y;
      if (of_parameter) {
        const at::Tensor weight = at::_make_dual(net.a->weight, numbers(net.a->weight.sizes(), 3),
                                                 static_cast<int64_t>(level));
        y = at::linear(x, weight, net.a->bias).tanh();
      } else {
        y = net.forward(at::_make_dual(x, tangent, static_cast<int64_t>(level)));
      }
      return std::get<1>(at::_unpack_dual(y, static_cast<int64_t>(level)));
    };
    for (const bool of_parameter : {false, true}) {
      const at::Tensor expected = derivative(*pair.plain, of_parameter);
      require(expected.defined(), "forward mode gives nothing");
      require_same(derivative(*pair.model, of_parameter), expected, "the derivative");
    }
    pair.step([](Net& net) { return loss_of(net.forward(input_of(0))); });
  });
  torch::autograd::ForwardADLevel::release_idx(level);
}

TEST(Transforms, ForwardModeOfARecomputedFunction) {
  const auto level = static_cast<int64_t>(torch::autograd::ForwardADLevel::get_next_idx());
  const at::Tensor x = input_of(1).set_requires_grad(true), tangent = input_of(2);
  const auto f = [](const at::Tensor& input) { return input.exp().sin(); };
  const at::Tensor plain = f(at::_make_dual(x, tangent, level));
  const at::Tensor again = parallel::recompute(f, at::_make_dual(x, tangent, level));
  EXPECT_TRUE(at::equal(std::get<1>(at::_unpack_dual(plain, level)),
                        std::get<1>(at::_unpack_dual(again, level))));
  const at::Tensor expected = torch::autograd::grad({plain.sum()}, {x})[0];
  EXPECT_TRUE(at::equal(torch::autograd::grad({again.sum()}, {x})[0], expected));
  torch::autograd::ForwardADLevel::release_idx(static_cast<uint64_t>(level));
}

}  // namespace
}  // namespace lockstep::test
