// SPDX-License-Identifier: Apache-2.0
#include "lockstep/parallel/intercept/deferred.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include <map>
#include <set>
#include <string>

#include "lockstep/parallel/intercept/dispatch.h"
#include "lockstep/parallel/intercept/recording.h"

namespace lockstep::parallel::detail {
namespace {

// Gives tensors of a model memory on the device. Tensors that shared memory share it again.
class Materializer {
 public:
  Materializer(const Recording& recording, const MaterializeOptions& options)
      : recording_(recording), options_(options) {}

  void give(const NamedTensor& named, bool is_parameter) {
    const at::Tensor& tensor = named.tensor;
    if (storage_of(tensor) == nullptr || !done_.insert(tensor.unsafeGetTensorImpl()).second) return;
    const c10::Storage old = tensor.storage();
    auto found = memory_.find(storage_of(tensor));
    if (found == memory_.end()) {
      const c10::Storage made = memory_of(named, is_parameter);
      found = memory_.emplace(storage_of(tensor), Memory{old, made}).first;
    }
    const c10::Storage& now = found->second.now;
    if (now.unsafeGetStorageImpl() != storage_of(tensor)) {
      give_memory(tensor, tensor_over(now, tensor));
    }
  }

  // Memory with the initial values of a tensor.
  c10::Storage memory_of(const NamedTensor& named, bool is_parameter) const;

 private:
  struct Memory {
    c10::Storage old;  // held, so that no other gets its address
    c10::Storage now;
  };

  const Recording& recording_;
  const MaterializeOptions& options_;
  std::set<const c10::TensorImpl*> done_;
  std::map<StorageKey, Memory> memory_;
};

c10::Storage Materializer::memory_of(const NamedTensor& named, bool is_parameter) const {
  const at::Tensor& tensor = named.tensor;
  const bool known = recording_.knows(tensor);
  const auto with_rule = [&](const c10::Storage& storage) {
    return is_parameter && options_.rule &&
           options_.rule(tensor_over(storage, tensor), {.seed = options_.seed, .name = named.name});
  };
  if (!known) {
    const c10::Storage moved = bytes_of(tensor).to(options_.device).storage();
    with_rule(moved);
    return moved;
  }
  if (is_parameter && options_.rule) {
    const c10::Storage blank = new_storage(tensor, options_.device);
    if (with_rule(blank)) return blank;
  }
  return recording_.value(tensor, named.name, options_.seed, options_.device).storage();
}

template <class Items>
void append(std::vector<NamedTensor>& list, const Items& items) {
  for (const auto& item : items) {
    if (item.value().defined()) list.push_back({item.key(), item.value()});
  }
}

void give_rest(Materializer materializer, const torch::nn::Module& model,
               const Recording& recording) {
  std::vector<NamedTensor> buffers;
  append(buffers, model.named_buffers());
  for (const NamedTensor& named : buffers) materializer.give(named, false);
  for (const NamedTensor& named : recording.unregistered()) materializer.give(named, false);
}

}  // namespace

std::shared_ptr<Recording> record(const std::function<const torch::nn::Module&()>& make) {
  auto recording = std::make_shared<Recording>();
  std::vector<NamedTensor> registered;
  {
    const RecordingScope scope(*recording);
    const torch::nn::Module& model = make();
    append(registered, model.named_parameters());
    append(registered, model.named_buffers());
  }
  recording->finish(registered);
  return recording;
}

at::Tensor initial_value(const NamedTensor& parameter, const Recording& recording,
                         const MaterializeOptions& options) {
  const at::NoGradGuard no_grad;
  const Materializer materializer(recording, options);
  return tensor_over(materializer.memory_of(parameter, true), parameter.tensor);
}

void materialize_rest(torch::nn::Module& model, const Recording& recording,
                      const MaterializeOptions& options) {
  const at::NoGradGuard no_grad;
  give_rest(Materializer(recording, options), model, recording);
}

void materialize(torch::nn::Module& model, const Recording& recording,
                 const MaterializeOptions& options) {
  const at::NoGradGuard no_grad;
  Materializer materializer(recording, options);
  std::vector<NamedTensor> parameters;
  append(parameters, model.named_parameters());
  for (const NamedTensor& named : parameters) materializer.give(named, true);
  give_rest(std::move(materializer), model, recording);
}

}  // namespace lockstep::parallel::detail
