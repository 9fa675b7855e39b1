// SPDX-License-Identifier: Apache-2.0
// What every optimizer offers.
#pragma once

#include <ATen/core/Tensor.h>

#include <span>
#include <string>
#include <vector>

#include "lockstep/optim/parameters/parameters.h"

namespace lockstep::optim {

// Not thread safe; different optimizers are independent.
class Optimizer {
 public:
  virtual ~Optimizer() = default;

  // Updates every parameter that has a gradient. One without is left alone: no decay, no momentum.
  virtual void step() = 0;
  // The same with all gradients multiplied by a factor, as clip_grad_with_norm() multiplies them.
  // Some optimizers do so where they read them: grad() may be left as it was.
  virtual void step_scaled(double factor);

  // Whether backward updates parameters as it goes, so that gradients cannot be changed before a
  // step.
  virtual bool updates_in_backward() const { return false; }

  // The learning rate of groups whose lr_scale is 1.
  virtual double lr() const = 0;
  virtual void set_lr(double lr) = 0;
  // lr_scale and weight_decay may be changed, and hold from the next step on.
  virtual std::span<ParameterGroup> groups() = 0;

  // All that a step reads besides parameters and gradients, as "layer.weight.exp_avg". The tensors
  // are the optimizer's own, not copies; what does not exist before the first step is made.
  virtual std::vector<NamedTensor> state() = 0;
  // Copies into the state, after checking that `entries` are what state() would give, in any order.
  virtual void load_state(std::span<const NamedTensor> entries) = 0;

  // Of all groups, in their order.
  std::vector<at::Tensor> parameters();
  // Gradients become undefined, which frees them.
  void zero_grad();
};

// What an optimizer offers too where it keeps its state encoded or offloaded: state in staging
// tensors, one at a time, so that a checkpoint never needs memory for all of it in the form that
// state() has. For each name: refresh(), then read or write the tensor, then adopt() where it was
// written.
class StagedState {
 public:
  // The tensors of state(), with undefined values. They belong to the caller: their memory is freed
  // when the caller drops them.
  virtual std::vector<NamedTensor> lazy_state() = 0;
  // Fills the staging tensor of this name with the state.
  virtual void refresh(const std::string& name) = 0;
  // Takes over into the state what was written to the staging tensor after refresh().
  virtual void adopt(const std::string& name) = 0;

 protected:
  ~StagedState() = default;
};

}  // namespace lockstep::optim
