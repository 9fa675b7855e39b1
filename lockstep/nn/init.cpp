// SPDX-License-Identifier: Apache-2.0
#include "lockstep/nn/init.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::nn::init {
namespace {

void fill_from(const Source& source, const at::Tensor& tensor, const Distribution& distribution) {
  fill(tensor, random_key(source.seed, "init", source.name), distribution, source.slice);
}

struct Fans {
  double in, out;
};

Fans fans_of(const at::Tensor& tensor, const Source& source) {
  const layout::Shape shape = source.slice ? source.slice->shape : tensor.sizes().vec();
  if (shape.size() < 2) {
    throw ConfigError(
        format("[init] '{}' has shape {}, must have two dimensions or more to have fans",
               source.name, layout::describe(shape)));
  }
  double receptive = 1;
  for (size_t dim = 2; dim < shape.size(); ++dim) receptive *= static_cast<double>(shape[dim]);
  return {static_cast<double>(shape[1]) * receptive, static_cast<double>(shape[0]) * receptive};
}

double xavier_std(const Fans& fans, const XavierOptions& options) {
  return options.gain * std::sqrt(2 / (fans.in + fans.out));
}

double kaiming_std(const Fans& fans, const KaimingOptions& options) {
  return options.gain / std::sqrt(options.fan == Fan::in ? fans.in : fans.out);
}

// Of this deviation.
Distribution symmetric_uniform(double std) {
  const double bound = std::sqrt(3.0) * std;
  return Distribution::uniform(-bound, bound);
}

}  // namespace

Source Source::of(uint64_t seed, const layout::Placement& placement) {
  return {seed, placement.name, Slice{placement.global_shape, placement.slice}};
}

void normal_(const at::Tensor& tensor, const Source& source, const NormalOptions& options) {
  fill_from(source, tensor, Distribution::normal(options.mean, options.std));
}

void uniform_(const at::Tensor& tensor, const Source& source, const UniformOptions& options) {
  fill_from(source, tensor, Distribution::uniform(options.low, options.high));
}

void trunc_normal_(const at::Tensor& tensor, const Source& source,
                   const TruncatedNormalOptions& options) {
  fill_from(source, tensor,
            Distribution::truncated_normal(options.mean, options.std, options.low, options.high));
}

void xavier_normal_(const at::Tensor& tensor, const Source& source, const XavierOptions& options) {
  fill_from(source, tensor, Distribution::normal(0, xavier_std(fans_of(tensor, source), options)));
}

void xavier_uniform_(const at::Tensor& tensor, const Source& source, const XavierOptions& options) {
  fill_from(source, tensor, symmetric_uniform(xavier_std(fans_of(tensor, source), options)));
}

void kaiming_normal_(const at::Tensor& tensor, const Source& source,
                     const KaimingOptions& options) {
  fill_from(source, tensor, Distribution::normal(0, kaiming_std(fans_of(tensor, source), options)));
}

void kaiming_uniform_(const at::Tensor& tensor, const Source& source,
                      const KaimingOptions& options) {
  fill_from(source, tensor, symmetric_uniform(kaiming_std(fans_of(tensor, source), options)));
}

void constant_(const at::Tensor& tensor, double value) {
  const at::NoGradGuard no_grad;
  tensor.fill_(value);
}

}  // namespace lockstep::nn::init
