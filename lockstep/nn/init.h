// SPDX-License-Identifier: Apache-2.0
// Initial values as a function of (seed, name): the same bits in every layout, on every device. A
// tensor that is a slice gets what the whole tensor has there.
#pragma once

#include <cmath>
#include <cstdint>
#include <optional>
#include <string>

#include "lockstep/core/torch_fwd.h"
#include "lockstep/layout/placement.h"
#include "lockstep/nn/random/random.h"

namespace lockstep::nn::init {

// Whose values.
struct Source {
  uint64_t seed = 0;
  std::string name;                 // the tensor's name in the whole model
  std::optional<Slice> slice = {};  // none: the tensor is whole

  static Source of(uint64_t seed, const layout::Placement& placement);
};

struct NormalOptions {
  double mean = 0, std = 1;
};
struct UniformOptions {
  double low = 0, high = 1;
};
struct TruncatedNormalOptions {
  double mean = 0, std = 1, low = -2, high = 2;
};
// The gain for a linear layer or a sigmoid is 1, for tanh 5/3, for relu sqrt(2), for a leaky relu
// of slope a sqrt(2 / (1 + a^2)).
struct XavierOptions {
  double gain = 1;
};
enum class Fan { in, out };
struct KaimingOptions {
  double gain = std::sqrt(2.0);
  Fan fan = Fan::in;
};

// All fill in place and are not recorded by autograd. Fans are those of the whole tensor, which
// must have two dimensions or more: (out, in, kernel...).
void normal_(const at::Tensor& tensor, const Source& source, const NormalOptions& options = {});
void uniform_(const at::Tensor& tensor, const Source& source, const UniformOptions& options = {});
void trunc_normal_(const at::Tensor& tensor, const Source& source,
                   const TruncatedNormalOptions& options = {});
void xavier_normal_(const at::Tensor& tensor, const Source& source,
                    const XavierOptions& options = {});
void xavier_uniform_(const at::Tensor& tensor, const Source& source,
                     const XavierOptions& options = {});
void kaiming_normal_(const at::Tensor& tensor, const Source& source,
                     const KaimingOptions& options = {});
void kaiming_uniform_(const at::Tensor& tensor, const Source& source,
                      const KaimingOptions& options = {});
void constant_(const at::Tensor& tensor, double value);

}  // namespace lockstep::nn::init
