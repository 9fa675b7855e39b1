// SPDX-License-Identifier: Apache-2.0
// Users' own layers, trained by one process and as a pipeline.
#pragma once

#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <chrono>
#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/core/philox.h"
#include "lockstep/parallel/pipeline/pipeline.h"

namespace lockstep::test {

using layout::PipelineSchedule;
using parallel::Pipeline;
using parallel::PipelineBatch;
using parallel::PipelineOptions;
using parallel::Tensors;

inline at::Tensor random(at::IntArrayRef sizes, int64_t seed) {
  return at::randn(sizes, at::detail::createCPUGenerator(static_cast<uint64_t>(seed)));
}

// The same values on whichever rank has it.
inline void set_value(const std::string& name, const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  tensor.copy_(
      random(tensor.sizes(), static_cast<int64_t>(random_key(0, "value", name).tensor >> 2)) * 0.5);
}

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t width, int64_t out = 0)
      : linear(register_module("linear", torch::nn::Linear(width, out > 0 ? out : width))) {}
  at::Tensor forward(const at::Tensor& x) { return at::tanh(linear(x)); }

  torch::nn::Linear linear;
};
TORCH_MODULE(Block);

inline std::vector<parallel::Layer> blocks(int count, int64_t width = 6) {
  std::vector<parallel::Layer> layers;
  for (int i = 0; i < count; ++i)
    layers.push_back(
        parallel::layer("blocks." + std::to_string(i), [width] { return Block(width); }));
  return layers;
}

struct PipelineJob {
  std::vector<parallel::Layer> layers;
  // Of micro-batch `i`, counted through all steps.
  std::function<Tensors(int64_t i)> inputs = [](int64_t i) { return Tensors{random({3, 6}, i)}; };
  std::function<at::Tensor(int64_t i, const Tensors& outputs)> loss = [](int64_t i,
                                                                         const Tensors& outputs) {
    return (outputs[0] - random(outputs[0].sizes(), 1000 + i)).square().sum();
  };
  // Called with the names and tensors of every module that is built.
  std::function<void(const std::string&, at::Tensor)> prepare = [](const std::string&, at::Tensor) {
  };
};

inline PipelineBatch batch_of(const PipelineJob& job, int64_t first) {
  return {.inputs = [&job, first](int i) { return job.inputs(first + i); },
          .loss = [&job, first](int i, const Tensors& out) { return job.loss(first + i, out); }};
}

// Of one process. The gradients of a step begin anew.
class OneProcess {
 public:
  explicit OneProcess(const PipelineJob& job) : job_(job) {
    for (const parallel::Layer& layer : job.layers) layers_.push_back(layer.build(*module_));
    for (const auto& item : module_->named_parameters()) {
      set_value(item.key(), item.value());
      job.prepare(item.key(), item.value());
    }
  }

  Tensors forward(int64_t i) const {
    Tensors x = job_.inputs(i);
    for (const auto& layer : layers_) x = layer(x);
    return x;
  }
  at::Tensor loss(int64_t i) const { return job_.loss(i, forward(i)); }
  std::vector<double> step(int64_t first, int count) {
    for (const at::Tensor& parameter : module_->parameters()) parameter.mutable_grad().reset();
    std::vector<double> losses;
    for (int i = 0; i < count; ++i) {
      const at::Tensor value = loss(first + i);
      if (value.requires_grad()) value.backward();
      losses.push_back(value.item<double>());
    }
    return losses;
  }
  void update() const {
    const at::NoGradGuard no_grad;
    for (const at::Tensor& parameter : module_->parameters()) {
      if (parameter.grad().defined()) parameter.sub_(parameter.grad() * 0.02);
    }
  }
  torch::nn::Module& module() const { return *module_; }
  at::Tensor gradient(const std::string& name) const {
    return module_->named_parameters()[name].grad();
  }

 private:
  const PipelineJob& job_;
  std::shared_ptr<torch::nn::Module> module_ = std::make_shared<torch::nn::Module>();
  std::vector<parallel::LayerForward> layers_;
};

inline Pipeline make_pipeline(const PipelineJob& job, const comm::Group& group,
                              PipelineOptions options) {
  Pipeline pipeline(job.layers, group, std::move(options));
  for (const auto& module : pipeline.modules()) {
    for (const auto& item : module->named_parameters()) {
      set_value(item.key(), item.value());
      job.prepare(item.key(), item.value());
    }
  }
  return pipeline;
}

inline std::vector<double> doubles(const at::Tensor& tensor) {
  return {tensor.data_ptr<double>(), tensor.data_ptr<double>() + tensor.numel()};
}

inline void expect_near(const std::vector<double>& found, const std::vector<double>& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < found.size(); ++i)
    EXPECT_NEAR(found[i], expected[i], 1e-5 * (1 + std::abs(expected[i]))) << "micro-batch " << i;
}

inline void expect_gradients(const Pipeline& pipeline, const OneProcess& expected) {
  for (const auto& [name, tensor, parts] : pipeline.named_parameters()) {
    const at::Tensor gradient = expected.gradient(name);
    ASSERT_EQ(tensor.grad().defined(), gradient.defined()) << name;
    if (gradient.defined()) {
      EXPECT_TRUE(at::allclose(tensor.grad(), gradient, 1e-5, 1e-6)) << name;
    }
  }
}

// Three steps of gradient descent, each compared.
inline void follow(const PipelineJob& job, const comm::Group& group,
                   const PipelineOptions& options) {
  SCOPED_TRACE(std::string(layout::name_of(options.schedule)) + " on " +
               std::to_string(group.size()));
  OneProcess expected(job);
  Pipeline pipeline = make_pipeline(job, group, options);
  for (int step = 0; step < 3; ++step) {
    const int64_t first = step * options.microbatches;
    expect_near(doubles(pipeline.step(batch_of(job, first))),
                expected.step(first, options.microbatches));
    expect_gradients(pipeline, expected);
    double norm = 0;
    for (const at::Tensor& parameter : expected.module().parameters()) {
      if (parameter.grad().defined()) norm += parameter.grad().square().sum().item<double>();
    }
    EXPECT_NEAR(pipeline.grad_norm(), std::sqrt(norm), 1e-5 * (1 + std::sqrt(norm)));
    expected.update();
    const at::NoGradGuard no_grad;
    for (const auto& [name, tensor, parts] : pipeline.named_parameters()) {
      if (tensor.grad().defined()) tensor.sub_(tensor.grad() * 0.02);
      tensor.mutable_grad().reset();
    }
    const auto buffers = expected.module().named_buffers();
    for (const auto& module : pipeline.modules()) {
      for (const auto& item : module->named_buffers())
        EXPECT_TRUE(at::allclose(item.value(), buffers[item.key()], 1e-4, 1e-6)) << item.key();
    }
  }
}

inline void follow(const PipelineJob& job, int ranks, const PipelineOptions& options) {
  comm::run_threads(ranks, [&](const comm::Group& group) { follow(job, group, options); },
                    {.backend = "thread", .timeout = std::chrono::seconds(20)});
}

// Kinds that differ in what the engine does: order, chunks on a rank, a backward in halves.
inline std::vector<PipelineOptions> kinds() {
  return {{.schedule = PipelineSchedule::one_f_one_b, .microbatches = 4},
          {.schedule = PipelineSchedule::zb_h1, .microbatches = 4},
          {.schedule = PipelineSchedule::interleaved, .microbatches = 4, .chunks = 2},
          {.schedule = PipelineSchedule::zb_v, .microbatches = 4, .chunks = 2}};
}

// With four layers: two or four stages.
inline void follow_all(const PipelineJob& job) {
  for (const PipelineOptions& options : kinds()) follow(job, 2, options);
}

}  // namespace lockstep::test
