// SPDX-License-Identifier: Apache-2.0
#include "lockstep/parallel/intercept/infer_shapes.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <map>
#include <set>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/parallel/intercept/recorded_op.h"

namespace lockstep::parallel::detail {
namespace {

at::Tensor placed_like(const at::Tensor& tensor, c10::Device device) {
  const at::NoGradGuard no_grad;
  return at::empty_strided(tensor.sizes(), tensor.strides(),
                           tensor.options().device(device).requires_grad(false));
}

// Tensors of another device in place of the arguments.
class StandIns {
 public:
  explicit StandIns(c10::Device device) : device_(device) {}

  at::Tensor of(const at::Tensor& tensor) {
    // A number that takes part as a tensor must stay one: it has no say in the result's dtype.
    const bool number = tensor.unsafeGetTensorImpl()->is_wrapped_number();
    if (number || tensor.device() == device_) {
      kept_.insert(storage_of(tensor));
      return tensor;
    }
    const at::Tensor made = placed_like(tensor, device_);
    if (!made.is_meta()) made.zero_();
    originals_.emplace(made.unsafeGetTensorImpl(), tensor);
    storages_.insert(storage_of(made));
    made_.push_back(made);
    return made;
  }

  at::Tensor original(const at::Tensor& result, const c10::OperatorHandle& op) const {
    if (kept_.contains(storage_of(result))) return result;
    const auto found = originals_.find(result.unsafeGetTensorImpl());
    if (found != originals_.end()) return found->second;
    if (storages_.contains(storage_of(result))) {
      throw ConfigError(
          format("[deferred] operator {} makes a view of a tensor that has memory, with one that "
                 "has none; this is not supported",
                 name_of(op)));
    }
    return result.is_meta() ? result : placed_like(result, at::kMeta);
  }

 private:
  const c10::Device device_;
  std::vector<at::Tensor> made_;
  std::map<const c10::TensorImpl*, at::Tensor> originals_;
  std::set<StorageKey> storages_;  // of what was made
  std::set<StorageKey> kept_;      // of arguments
};

torch::jit::Stack outline_on(c10::Device device, const c10::OperatorHandle& op,
                             const Arguments& arguments) {
  StandIns stand_ins(device);
  torch::jit::Stack stack =
      with_tensors(arguments, [&](const at::Tensor& tensor) { return stand_ins.of(tensor); });
  set_device(op, stack, device);
  op.callBoxed(&stack);
  return with_tensors(stack,
                      [&](const at::Tensor& result) { return stand_ins.original(result, op); });
}

}  // namespace

torch::jit::Stack outline(const c10::OperatorHandle& op, const Arguments& arguments) {
  try {
    return outline_on(at::kMeta, op, arguments);
  } catch (const c10::NotImplementedError&) {
  }
  if (draw_of(op, arguments)) {
    throw ConfigError(
        format("[deferred] random operator {} cannot be recorded: torch does not say what it makes "
               "of tensors without memory",
               name_of(op)));
  }
  return outline_on(at::kCPU, op, arguments);
}

}  // namespace lockstep::parallel::detail
