// SPDX-License-Identifier: Apache-2.0
#include "lockstep/checkpoint/torch_optimizer.h"

#include <ATen/ATen.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <map>
#include <memory>
#include <sstream>
#include <type_traits>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::checkpoint::detail {
namespace {

using torch::optim::Optimizer;
using torch::optim::OptimizerOptions;
using States = std::remove_reference_t<decltype(std::declval<Optimizer&>().state())>;

// Newer versions key states by address, older ones by its text.
template <class Key>
Key key_of(const at::Tensor& parameter) {
  if constexpr (std::is_same_v<Key, std::string>) {
    std::ostringstream text;
    text << parameter.unsafeGetTensorImpl();
    return text.str();
  } else {
    return parameter.unsafeGetTensorImpl();
  }
}

// The state of one parameter, entry by entry.
class Entries {
 public:
  Entries(std::string parameter, std::vector<StateTensor>& all)
      : parameter_(std::move(parameter)), all_(all) {}

  void add(const char* name, const at::Tensor& tensor) {
    if (tensor.defined()) all_.push_back({parameter_ + "." + name, tensor});
  }
  // A number of the optimizer's, through a tensor.
  void add(const char* name, int64_t& number) {
    const at::Tensor tensor = at::zeros({}, at::kLong);
    all_.push_back({parameter_ + "." + name, tensor, [&number, tensor] { tensor.fill_(number); },
                    [&number, tensor] { number = tensor.item<int64_t>(); }});
  }

 private:
  std::string parameter_;
  std::vector<StateTensor>& all_;
};

template <class State>
concept LikeAdam = std::is_same_v<State, torch::optim::AdamParamState> ||
    std::is_same_v<State, torch::optim::AdamWParamState>;

template <LikeAdam State, class Options>
void fill(State& state, const Options& options, const at::Tensor& zeros) {
  state.exp_avg(zeros.clone());
  state.exp_avg_sq(zeros.clone());
  if (options.amsgrad()) state.max_exp_avg_sq(zeros.clone());
}
template <LikeAdam State>
void list(State& state, Entries& entries) {
  entries.add("step", state.step());
  entries.add("exp_avg", state.exp_avg());
  entries.add("exp_avg_sq", state.exp_avg_sq());
  entries.add("max_exp_avg_sq", state.max_exp_avg_sq());
}

void fill(torch::optim::SGDParamState& state, const torch::optim::SGDOptions& options,
          const at::Tensor& zeros) {
  if (options.momentum() != 0) state.momentum_buffer(zeros.clone());
}
void list(torch::optim::SGDParamState& state, Entries& entries) {
  entries.add("momentum_buffer", state.momentum_buffer());
}

void fill(torch::optim::RMSpropParamState& state, const torch::optim::RMSpropOptions& options,
          const at::Tensor& zeros) {
  state.square_avg(zeros.clone());
  if (options.momentum() > 0) state.momentum_buffer(zeros.clone());
  if (options.centered()) state.grad_avg(zeros.clone());
}
void list(torch::optim::RMSpropParamState& state, Entries& entries) {
  entries.add("step", state.step());
  entries.add("square_avg", state.square_avg());
  entries.add("momentum_buffer", state.momentum_buffer());
  entries.add("grad_avg", state.grad_avg());
}

// Its constructor makes the states.
void fill(torch::optim::AdagradParamState& state, const torch::optim::AdagradOptions& options,
          const at::Tensor& zeros) {
  state.sum(at::full_like(zeros, options.initial_accumulator_value()));
}
void list(torch::optim::AdagradParamState& state, Entries& entries) {
  entries.add("step", state.step());
  entries.add("sum", state.sum());
}

template <class State, class Options>
void add_states(Optimizer& optimizer, const std::map<const c10::TensorImpl*, std::string>& names,
                std::vector<StateTensor>& all) {
  for (auto& group : optimizer.param_groups()) {
    const auto& options = static_cast<const Options&>(group.options());
    for (const at::Tensor& parameter : group.params()) {
      if (!parameter.requires_grad()) continue;
      const auto name = names.find(parameter.unsafeGetTensorImpl());
      if (name == names.end()) {
        throw ConfigError(format(
            "[checkpoint] the optimizer has a parameter of shape ({}) that the model does not have",
            join(parameter.sizes())));
      }
      const auto key = key_of<States::key_type>(parameter);
      if (optimizer.state().find(key) == optimizer.state().end()) {
        auto made = std::make_unique<State>();
        fill(*made, options, at::zeros_like(parameter, at::MemoryFormat::Preserve));
        optimizer.state()[key] = std::move(made);
      }
      Entries entries(name->second, all);
      list(static_cast<State&>(*optimizer.state()[key]), entries);
    }
  }
}

}  // namespace

std::vector<StateTensor> state_of(Optimizer& optimizer,
                                  std::span<const optim::NamedParameter> names) {
  const at::NoGradGuard no_grad;
  std::map<const c10::TensorImpl*, std::string> by_tensor;
  for (const auto& [name, tensor, parts] : names)
    by_tensor.emplace(tensor.unsafeGetTensorImpl(), name);
  std::vector<StateTensor> all;
  using namespace torch::optim;
  if (dynamic_cast<AdamW*>(&optimizer) != nullptr) {
    add_states<AdamWParamState, AdamWOptions>(optimizer, by_tensor, all);
  } else if (dynamic_cast<Adam*>(&optimizer) != nullptr) {
    add_states<AdamParamState, AdamOptions>(optimizer, by_tensor, all);
  } else if (dynamic_cast<SGD*>(&optimizer) != nullptr) {
    add_states<SGDParamState, SGDOptions>(optimizer, by_tensor, all);
  } else if (dynamic_cast<RMSprop*>(&optimizer) != nullptr) {
    add_states<RMSpropParamState, RMSpropOptions>(optimizer, by_tensor, all);
  } else if (dynamic_cast<Adagrad*>(&optimizer) != nullptr) {
    add_states<AdagradParamState, AdagradOptions>(optimizer, by_tensor, all);
  } else {
    throw ConfigError(
        "[checkpoint] torch's optimizers Adam, AdamW, SGD, RMSprop and Adagrad can be saved; for "
        "another optimizer, list its state tensors yourself");
  }
  return all;
}

}  // namespace lockstep::checkpoint::detail
