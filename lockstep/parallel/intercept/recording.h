// SPDX-License-Identifier: Apache-2.0
// Construction as a list of operators, and the values that they give to tensors.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "lockstep/core/torch_fwd.h"
#include "lockstep/parallel/intercept/deferred.h"
#include "lockstep/parallel/intercept/recorded_op.h"

namespace lockstep::parallel::detail {

struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};

// Storages are of two kinds. Real ones have memory that can be read. Deferred ones have values that
// are known only later: they are large and on the meta device, or depend on random numbers (and may
// then have memory, with nothing in it that means anything). Operators on real ones just run; an
// operator that a deferred one takes part in becomes a step, and what it makes is deferred.
class Recording {
 public:
  // Runs an operator of a constructor, or makes it a step. The dispatch key must be excluded.
  void call(const c10::OperatorHandle& op, torch::jit::Stack* stack);
  // Ends the recording: says what the model's tensors are called, in their order.
  void finish(const std::vector<NamedTensor>& registered);

  bool knows(const at::Tensor& tensor) const { return deferred_.contains(storage_of(tensor)); }
  // A new tensor on the device with the value of one that is known, placed in a storage of its own
  // as that is in its. `name` is its name in the whole model; random numbers are functions of
  // (seed, name, index). Nothing else is computed than what leads to it.
  at::Tensor value(const at::Tensor& tensor, const std::string& name, uint64_t seed,
                   c10::Device device) const;
  // Deferred tensors that are not registered but still referenced, with generated names.
  const std::vector<NamedTensor>& unregistered() const { return unregistered_; }

 private:
  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

  void note(const c10::OperatorHandle& op, torch::jit::Stack* stack, bool run);
  std::vector<Step> take_arguments(Step& step, const Arguments& arguments) const;
  void take_results(Step& step, const Arguments& arguments, const torch::jit::Stack& results);
  void add(Step step);
  std::set<size_t> steps_to(StorageKey storage) const;

  std::vector<Step> steps_;
  std::set<StorageKey> deferred_;  // kept alive by the steps
  std::unordered_map<StorageKey, std::vector<size_t>> writers_;
  std::unordered_map<StorageKey, std::string> names_;
  std::vector<WeakTensor> seen_;  // a handle of ours would make torch copy what it can move
  std::vector<NamedTensor> unregistered_;
};

// What materialize() would give to one parameter, in memory of its own.
at::Tensor initial_value(const NamedTensor& parameter, const Recording& recording,
                         const MaterializeOptions& options);
// The same as materialize() for all tensors but parameters.
void materialize_rest(torch::nn::Module& model, const Recording& recording,
                      const MaterializeOptions& options);

// Makes a tensor one with the memory, the values and the device of another. It stays the same
// object: a leaf, with or without requires_grad, as before.
void give_memory(const at::Tensor& tensor, const at::Tensor& real);

}  // namespace lockstep::parallel::detail
