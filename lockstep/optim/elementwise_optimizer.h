// SPDX-License-Identifier: Apache-2.0
// What optimizers share that update every element by itself: groups, state, and one pass over the
// memory of all parameters.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "lockstep/optim/optimizer.h"

namespace lockstep::optim::detail {

struct PlacedRuns;  // placed_runs.h

// One parameter in one step.
struct Update {
  at::Tensor param;
  at::Tensor grad;
  at::Tensor master;                // float32; undefined where the parameter has no 16-bit type
  std::vector<at::Tensor> buffers;  // in the order of the names given to the constructor
  int64_t step;                     // of this parameter, counted from 1
  double grad_factor = 1;           // that update_on_device() multiplies the gradient by
  double lr;
  double weight_decay;
  // Of its elements in whole tensors, where state is rounded stochastically; else null.
  std::shared_ptr<const std::vector<PlacedRuns>> places;

  const at::Tensor& weight() const { return master.defined() ? master : param; }
};

class ElementwiseOptimizer : public Optimizer {
 public:
  void step() final { step_scaled(1); }
  void step_scaled(double factor) final;
  double lr() const final { return lr_; }
  void set_lr(double lr) final;
  std::span<ParameterGroup> groups() final { return groups_; }
  std::vector<NamedTensor> state() final;
  void load_state(std::span<const NamedTensor> entries) final;

 protected:
  // `buffers` names the state tensors of a parameter, which begin as zeros of its shape.
  ElementwiseOptimizer(std::string name, std::vector<std::string> buffers,
                       std::vector<ParameterGroup> groups, double lr, double weight_decay);

  // The type of the state of a parameter that is computed in this type. One with fewer bits is
  // rounded stochastically.
  virtual at::ScalarType buffer_type(at::ScalarType computed) const { return computed; }

  // What to do with elements [begin, end) of an update whose tensors are dense CPU memory with the
  // same strides.
  using Kernel = std::function<void(int64_t begin, int64_t end)>;
  virtual Kernel kernel_for(const Update& update) const = 0;
  // The same by torch's operators, for any device and any strides. The gradients have the type of
  // weight(), which is to be updated.
  virtual void update_by_operators(std::span<const Update> updates) const = 0;
  // The same for updates of CUDA memory that have a kernel (cuda::has_kernel), queued on its
  // device.
  virtual void update_on_device(std::span<const Update> updates) const = 0;
  // Whether the update was made with its sparse gradient as it is; if not it is made dense.
  virtual bool update_sparse(const Update&) const { return false; }

 private:
  // A parameter and its state, which is made when it is first needed.
  struct Slot {
    NamedParameter parameter;
    size_t group;
    bool has_state = false;
    at::Tensor step = {};  // int64, 0-d
    at::Tensor master = {};
    std::vector<at::Tensor> buffers = {};
    std::shared_ptr<const std::vector<PlacedRuns>> places = nullptr;
  };

  void add_group(ParameterGroup group, double weight_decay);
  void make_state(Slot& slot) const;
  void check_unchanged(const Slot& slot) const;
  Update next_update(Slot& slot) const;
  void scale_where_kernels_do_not(double factor);
  std::vector<NamedTensor> state_of(const Slot& slot) const;

  std::string name_;
  std::vector<std::string> buffer_names_;
  std::vector<ParameterGroup> groups_;
  std::vector<Slot> slots_;
  double lr_;
};

}  // namespace lockstep::optim::detail
