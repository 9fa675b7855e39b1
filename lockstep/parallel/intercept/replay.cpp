// SPDX-License-Identifier: Apache-2.0
#include "lockstep/parallel/intercept/replay.h"

#include <ATen/ATen.h>
#include <ATen/core/stack.h>

#include "lockstep/core/error.h"

namespace lockstep::parallel::detail {

at::Tensor Replay::real(const at::Tensor& recorded) {
  auto found = storages_.find(storage_of(recorded));
  if (found == storages_.end()) {
    found = storages_.emplace(storage_of(recorded), new_storage(recorded, device_)).first;
    taken_.insert(found->second.unsafeGetStorageImpl());
  }
  return tensor_over(found->second, recorded);
}

at::Tensor Replay::argument(const at::Tensor& recorded) {
  if (deferred_.contains(storage_of(recorded))) return real(recorded);
  taken_.insert(storage_of(recorded));
  return recorded.unsafeGetTensorImpl()->is_wrapped_number() ? recorded : recorded.to(device_);
}

// The memory of a result becomes that of the recorded one, if it is new and laid out the same.
void Replay::adopt(const at::Tensor& recorded, const at::Tensor& result) {
  if (storages_.contains(storage_of(recorded))) return;
  const bool same = result.sizes() == recorded.sizes() && result.strides() == recorded.strides() &&
                    result.storage_offset() == recorded.storage_offset() &&
                    result.storage().nbytes() >= recorded.storage().nbytes();
  if (same && taken_.insert(storage_of(result)).second) {
    storages_.emplace(storage_of(recorded), result.storage());
  } else {
    real(recorded).copy_(result);
  }
}

void Replay::run(const Step& step) {
  if (!step.op) {
    real(step.results[0]).copy_(step.arguments[0].toTensor());
    return;
  }
  torch::jit::Stack stack =
      with_tensors(step.arguments, [&](const at::Tensor& t) { return argument(t); });
  set_device(*step.op, stack, device_);
  step.op->callBoxed(&stack);
  std::vector<at::Tensor> results;
  for_each_tensor(stack, [&](const at::Tensor& result) { results.push_back(result); });
  check(results.size() == step.results.size(), "an operator makes as many tensors as before");
  for (size_t i = 0; i < results.size(); ++i) adopt(step.results[i], results[i]);
  if (is_uninitialised(*step.op)) real(step.results[0]).zero_();
}

void Replay::draw(const Step& step, const nn::init::Source& source) {
  // In place, an operator returns what it fills.
  const at::Tensor target = real(step.results.at(0));
  if (step.draw->kind == Draw::Kind::uniform) {
    nn::init::uniform_(target, source, {.low = step.draw->first, .high = step.draw->second});
  } else {
    nn::init::normal_(target, source, {.mean = step.draw->first, .std = step.draw->second});
  }
}

}  // namespace lockstep::parallel::detail
