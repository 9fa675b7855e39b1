// SPDX-License-Identifier: Apache-2.0
// What a function finds when it is called again: random generators, random context and buffers as
// they were. Private: not installed.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <c10/core/GradMode.h>
#include <torch/nn/module.h>

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "lockstep/nn/random/random_context.h"

namespace lockstep::parallel::detail {

// The state of torch's generators: of the CPU, and of the current CUDA device.
class GeneratorStates {
 public:
  GeneratorStates() {
    for (at::Generator& generator : all_) {
      const std::lock_guard lock(generator.mutex());
      states_.push_back(generator.get_state());
    }
  }
  void restore() const {
    for (size_t i = 0; i < states_.size(); ++i) {
      at::Generator generator = all_[i];
      const std::lock_guard lock(generator.mutex());
      generator.set_state(states_[i]);
    }
  }

 private:
  static std::vector<at::Generator> generators() {
    std::vector<at::Generator> all{at::detail::getDefaultCPUGenerator()};
    if (at::hasCUDA()) all.push_back(at::globalContext().defaultGenerator(at::kCUDA));
    return all;
  }
  std::vector<at::Generator> all_ = generators();
  std::vector<at::Tensor> states_;
};

// Sets generators and random context back for a scope, and leaves them as they were before it.
class Past {
 public:
  Past(const GeneratorStates& states, const std::shared_ptr<nn::RandomContext>& random,
       const nn::RandomContext& was)
      : random_(random) {
    states.restore();
    if (random_) now_ = std::exchange(*random_, was);
  }
  ~Past() {
    present_.restore();
    if (random_) *random_ = now_;
  }
  Past(const Past&) = delete;
  Past& operator=(const Past&) = delete;

 private:
  GeneratorStates present_;
  std::shared_ptr<nn::RandomContext> random_;
  nn::RandomContext now_;
};

// Leaves the buffers of modules as they were before it. Autograd is not told of the writes: a node
// that has saved a buffer finds the values that it saved.
class UnchangedBuffers {
 public:
  explicit UnchangedBuffers(const std::vector<std::shared_ptr<torch::nn::Module>>& modules) {
    for (const auto& module : modules) {
      for (const at::Tensor& buffer : module->buffers(/*recurse=*/false)) {
        if (buffer.defined())
          buffers_.emplace_back(buffer.variable_data(), buffer.detach().clone());
      }
    }
  }
  ~UnchangedBuffers() {
    const at::NoGradGuard no_grad;
    for (const auto& [buffer, was] : buffers_) buffer.copy_(was);
  }
  UnchangedBuffers(const UnchangedBuffers&) = delete;
  UnchangedBuffers& operator=(const UnchangedBuffers&) = delete;

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> buffers_;
};

}  // namespace lockstep::parallel::detail
