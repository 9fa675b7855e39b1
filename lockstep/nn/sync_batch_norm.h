// SPDX-License-Identifier: Apache-2.0
// Batch normalisation over the batches of all ranks of a group.
#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/options/batchnorm.h>
#include <torch/nn/pimpl.h>

#include <concepts>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

#include "lockstep/comm/group.h"

namespace lockstep::nn {

struct SyncBatchNormOptions {
  double eps = 1e-5;
  std::optional<double> momentum = 0.1;  // none: running statistics are plain averages
  bool affine = true;
  bool track_running_stats = true;
  std::string name = "SyncBatchNorm";  // of this layer in messages; the same on all ranks
};

// Takes (N, C), (N, C, L), (N, C, H, W) or (N, C, D, H, W) and has the parameters and buffers of
// torch::nn::BatchNorm1d/2d/3d under their names, so that state carries over. In training, mean and
// variance are those of one process with the batches of all ranks, which may differ in size; a rank
// may even have N = 0. In eval it is torch's batch norm, and ranks need not agree.
//
// Collective in training: one all_gather in forward, one all_reduce in backward, both of a few
// values per channel. All ranks run both, a rank without rows too (its loss may be output.sum()).
// Gradients of weight and bias are this rank's share; what averages the gradients of the model adds
// them up. bfloat16 and float16 inputs are normalised in float32. Not differentiable twice.
class SyncBatchNormImpl : public torch::nn::Cloneable<SyncBatchNormImpl> {
 public:
  explicit SyncBatchNormImpl(int64_t num_features, comm::Group group = {},
                             SyncBatchNormOptions options = {});

  at::Tensor forward(const at::Tensor& input);

  void reset() override;
  void reset_running_stats();
  void pretty_print(std::ostream& stream) const override;

  int64_t num_features;
  comm::Group group;
  SyncBatchNormOptions options;
  at::Tensor weight, bias;                                    // undefined unless affine
  at::Tensor running_mean, running_var, num_batches_tracked;  // undefined unless tracked

 private:
  void check_input(const at::Tensor& input) const;
  at::Tensor normalise_with_group(const at::Tensor& input);
};

// SyncBatchNorm(64, group, {.name = "bn1"})
class SyncBatchNorm : public torch::nn::ModuleHolder<SyncBatchNormImpl> {
 public:
  using torch::nn::ModuleHolder<SyncBatchNormImpl>::ModuleHolder;
  explicit SyncBatchNorm(int64_t num_features, comm::Group group = {},
                         SyncBatchNormOptions options = {})
      : ModuleHolder(std::make_shared<SyncBatchNormImpl>(num_features, std::move(group),
                                                         std::move(options))) {}
};

// A torch::nn::BatchNorm1d, 2d or 3d.
template <class T>
concept TorchBatchNorm =
    std::same_as<std::remove_cvref_t<decltype(std::declval<const T&>()->options)>,
                 torch::nn::BatchNormOptions>;

namespace detail {
SyncBatchNorm sync_batch_norm(const torch::nn::Module& source,
                              const torch::nn::BatchNormOptions& options, comm::Group group,
                              std::string name);
}

// One with a copy of the state of `source`: its values, dtype, device, mode and frozen parameters.
template <TorchBatchNorm BatchNorm>
SyncBatchNorm sync_batch_norm(const BatchNorm& source, comm::Group group,
                              std::string name = SyncBatchNormOptions().name) {
  return detail::sync_batch_norm(*source, source->options, std::move(group), std::move(name));
}

}  // namespace lockstep::nn
