// SPDX-License-Identifier: Apache-2.0
// Tensors of random numbers that are functions of a key and of the element's place in the whole
// tensor (docs/random.md): a slice holds what the whole would hold there, on any device, with any
// number of threads.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>

#include "lockstep/core/philox.h"
#include "lockstep/core/torch_fwd.h"
#include "lockstep/layout/box.h"

namespace lockstep::nn {

// The part of a whole tensor that a tensor at hand holds.
struct Slice {
  layout::Shape shape;  // of the whole tensor
  layout::Box box;      // what is held of it

  bool operator==(const Slice&) const = default;
};

// offset + scale * x, with x uniform in [0, 1) or normal; drawn again while outside [low, high].
// The factories throw ConfigError for values that make no distribution.
struct Distribution {
  enum class Kind : uint8_t { uniform, normal };

  Kind kind = Kind::uniform;
  float offset = 0, scale = 1;
  float low = -std::numeric_limits<float>::infinity();
  float high = std::numeric_limits<float>::infinity();

  // In [low, high); `high` itself can come from rounding.
  static Distribution uniform(double low, double high);
  static Distribution normal(double mean, double std);
  // Normal, but inside [low, high], which must hold at least a hundredth of the distribution.
  static Distribution truncated_normal(double mean, double std, double low, double high);
};

// Fills a tensor of any floating dtype in place: float32 values, rounded where the dtype has fewer
// bits. With a slice, its box must have the tensor's sizes. Not recorded by autograd.
void fill(const at::Tensor& tensor, const RandomKey& key, const Distribution& distribution,
          const std::optional<Slice>& slice = {});

}  // namespace lockstep::nn
