// SPDX-License-Identifier: Apache-2.0
// Recorded operators, done again with memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <set>
#include <unordered_map>

#include "lockstep/nn/init.h"
#include "lockstep/parallel/intercept/recorded_op.h"

namespace lockstep::parallel::detail {

class Replay {
 public:
  Replay(const std::set<StorageKey>& deferred, c10::Device device)
      : deferred_(deferred), device_(device) {}

  void run(const Step& step);
  // For a step that draws uniform or normal numbers.
  void draw(const Step& step, const nn::init::Source& source);
  // The tensor in the memory that stands for its storage.
  at::Tensor real(const at::Tensor& recorded);

 private:
  at::Tensor argument(const at::Tensor& recorded);
  void adopt(const at::Tensor& recorded, const at::Tensor& result);

  const std::set<StorageKey>& deferred_;
  const c10::Device device_;
  std::unordered_map<StorageKey, c10::Storage> storages_;
  std::set<StorageKey> taken_;  // memory that a result must not stand in
};

}  // namespace lockstep::parallel::detail
