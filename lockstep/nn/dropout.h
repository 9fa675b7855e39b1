// SPDX-License-Identifier: Apache-2.0
// Dropout whose mask is a function of the run's position and the element's place, not of what was
// drawn before: the same with any number of ranks, after a restart, and when recomputed.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>

#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <utility>

#include "lockstep/core/philox.h"
#include "lockstep/nn/random/random.h"
#include "lockstep/nn/random/random_context.h"
#include "lockstep/nn/tensor/sharing.h"

namespace lockstep::nn {

// Each element becomes 0 with chance p in [0, 1), or else itself / (1 - p). With a slice, the
// elements are masked as in the whole tensor. Backward draws the mask again, so nothing is kept for
// it but the key. Differentiable any number of times.
at::Tensor dropout(const at::Tensor& input, double p, const RandomKey& key,
                   const std::optional<Slice>& slice = {});

struct DropoutOptions {
  std::string name = {};                              // unless attach_random() is to give it
  std::shared_ptr<const RandomContext> context = {};  // likewise
};

// Like torch::nn::Dropout, the identity in eval mode. One for each place in a model: a module that
// is called twice in a forward masks twice alike.
class DropoutImpl : public torch::nn::Cloneable<DropoutImpl>,
                    public RandomLayer,
                    public SharedLayer {
 public:
  explicit DropoutImpl(double p = 0.5, DropoutOptions options = {});

  at::Tensor forward(const at::Tensor& input);
  // For a part of what the layer would get in one process, such as a shard of the sequence. The
  // slice says all about its place: the context's rows do not count.
  at::Tensor forward_slice(const at::Tensor& input, const Slice& slice);

  bool supports(layout::TensorStyle style) const override;
  void reset() override {}
  void pretty_print(std::ostream& stream) const override;

  double p() const { return p_; }

 private:
  at::Tensor drop_tokens(const at::Tensor& input, const RandomKey& key, bool has_part) const;
  Slice slice_of(const at::Tensor& part, int64_t length, const layout::Range& tokens) const;

  double p_;
};

// Dropout(0.1, {.name = "blocks.3.drop", .context = random})
class Dropout : public torch::nn::ModuleHolder<DropoutImpl> {
 public:
  using torch::nn::ModuleHolder<DropoutImpl>::ModuleHolder;
  explicit Dropout(double p = 0.5, DropoutOptions options = {})
      : ModuleHolder(std::make_shared<DropoutImpl>(p, std::move(options))) {}
};

}  // namespace lockstep::nn
