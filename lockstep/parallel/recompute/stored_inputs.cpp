// SPDX-License-Identifier: Apache-2.0
#include "lockstep/parallel/recompute/stored_inputs.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/variable.h>

#include <span>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/parallel/intercept/tag.h"

namespace lockstep::parallel::detail {
namespace {

// Others would live on, or cannot be copied as bytes. A leaf that needs a gradient is held by the
// graph, and of a sharded parameter the memory comes and goes.
bool gains_by_disk(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && (tensor.is_cpu() || tensor.is_cuda()) &&
         tensor.numel() > 0 && !tensor.is_quantized() && !tensor.is_inference() &&
         !(tensor.is_leaf() && tensor.requires_grad()) && find_tag(tensor) == nullptr;
}

}  // namespace

StoredInputs::StoredInputs(std::shared_ptr<ActivationStore> store,
                           const std::vector<at::Tensor>& tensors)
    : store_(std::move(store)) {
  bool any = false;
  for (const at::Tensor& tensor : tensors) {
    inputs_.push_back(put(tensor));
    any = any || inputs_.back().on_disk;
  }
  if (any) number_ = store_->add(this);
}

StoredInputs::~StoredInputs() {
  if (number_) store_->remove(*number_);
}

StoredInputs::Input StoredInputs::put(const at::Tensor& tensor) const {
  Input input;
  if (tensor.defined() && !tensor.is_inference()) {
    input.version = torch::autograd::impl::version_counter(tensor);
    input.saved_version = input.version.current_version();
  }
  const bool stays = store_ && !store_->disk_ && tensor.defined() && !tensor.is_cuda();
  if (!store_ || stays || !tensor.defined() || !gains_by_disk(tensor)) {
    input.in_memory = tensor;
    return input;
  }
  const c10::AutoGradMode no_grad(false);
  // Without the graph, which the thread that writes must not be the last to hold. Dense tensors
  // keep their strides, so that the second call finds what the first one found.
  at::Tensor bytes = tensor.variable_data().resolve_conj().resolve_neg();
  if (!bytes.is_non_overlapping_and_dense()) bytes = bytes.contiguous();
  if (!store_->disk_) {
    // Copied in the order of the stream, which also comes to the memory's next use later.
    const at::Tensor copy = at::empty_strided(bytes.sizes(), bytes.strides(),
                                              bytes.options().device(at::kCPU).pinned_memory(true));
    copy.copy_(bytes, /*non_blocking=*/true);
    input.on_host.emplace(OnHost{copy, tensor.device(), tensor.requires_grad()});
    return input;
  }
  bytes = bytes.cpu();
  auto owner = std::make_shared<at::Tensor>(bytes);
  const std::span view(static_cast<const std::byte*>(bytes.data_ptr()), bytes.nbytes());
  input.on_disk.emplace(OnDisk{.block = store_->disk_->put(view, std::move(owner)),
                               .options = tensor.options(),
                               .sizes = bytes.sizes().vec(),
                               .strides = bytes.strides().vec(),
                               .requires_grad = tensor.requires_grad()});
  return input;
}

at::Tensor StoredInputs::get(const Input& input) const {
  const auto as_it_was = [](const at::Tensor& tensor, bool requires_grad) {
    if (!requires_grad) return tensor;
    // Autocast keeps what it casts of leaves, and this was none.
    const c10::AutoGradMode grad(true);
    return tensor.set_requires_grad(true).view_as(tensor);
  };
  if (input.on_host) {
    const OnHost& stored = *input.on_host;
    return as_it_was(stored.copy.to(stored.device, /*non_blocking=*/true), stored.requires_grad);
  }
  if (!input.on_disk) return input.in_memory;
  const OnDisk& stored = *input.on_disk;
  auto bytes = store_->disk_->get(stored.block);
  void* const data = const_cast<std::byte*>(bytes.get());
  at::Tensor tensor = at::from_blob(
      data, stored.sizes, stored.strides, [bytes = std::move(bytes)](void*) {},
      stored.options.device(at::kCPU));
  if (stored.options.device().is_cuda()) tensor = tensor.to(stored.options.device());
  return as_it_was(tensor, stored.requires_grad);
}

void StoredInputs::prefetch() const {
  for (const Input& input : inputs_) {
    if (input.on_disk) store_->disk_->prefetch(input.on_disk->block);
  }
}

std::vector<at::Tensor> StoredInputs::tensors() const {
  std::vector<at::Tensor> all;
  for (const Input& input : inputs_) {
    if (input.version.enabled() && input.version.current_version() != input.saved_version) {
      throw Error(
          "[recompute] a tensor that backward needs was changed in place since the function was "
          "called");
    }
    all.push_back(get(input));
  }
  if (number_) store_->read_ahead(*number_);
  return all;
}

}  // namespace lockstep::parallel::detail
