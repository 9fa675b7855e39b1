// SPDX-License-Identifier: Apache-2.0
// What a recomputed function is called with, until it is called again. Private: not installed.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "lockstep/memory/disk_store.h"
#include "lockstep/parallel/recompute/recompute.h"

namespace lockstep::parallel::detail {

// The inputs of one call. Those that were on disk come back as they were, needing gradients or not,
// but on no graph but their own. Error where one was changed in place.
class StoredInputs {
 public:
  // Without a store they stay in memory.
  StoredInputs(std::shared_ptr<ActivationStore> store, const std::vector<at::Tensor>& tensors);
  ~StoredInputs();
  StoredInputs(const StoredInputs&) = delete;
  StoredInputs& operator=(const StoredInputs&) = delete;

  bool is_in_memory() const { return !number_; }
  // Waits for the disk, and starts to read the inputs that will be needed next.
  std::vector<at::Tensor> tensors() const;

 private:
  friend class parallel::ActivationStore;

  struct OnDisk {
    memory::DiskStore::Block block;
    at::TensorOptions options;
    std::vector<int64_t> sizes, strides;
    bool requires_grad;
  };
  // In pinned memory, of a tensor of a GPU.
  struct OnHost {
    at::Tensor copy;
    c10::Device device;
    bool requires_grad;
  };
  struct Input {
    at::Tensor in_memory;
    std::optional<OnHost> on_host;
    std::optional<OnDisk> on_disk;
    c10::VariableVersion version;  // alive without the tensor
    uint32_t saved_version = 0;
  };

  Input put(const at::Tensor& tensor) const;
  at::Tensor get(const Input& input) const;
  void prefetch() const;

  std::shared_ptr<ActivationStore> store_;
  std::vector<Input> inputs_;
  std::optional<int64_t> number_;  // none: nothing is on disk
};

}  // namespace lockstep::parallel::detail
