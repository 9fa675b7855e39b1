// SPDX-License-Identifier: Apache-2.0
#include "lockstep/nn/sync_batch_norm.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <array>
#include <ostream>
#include <utility>

#include "lockstep/comm/collectives.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// What a forward pass leaves for its backward pass.
struct BatchMoments : torch::CustomClassHolder {
  comm::Group group;
  std::string name;
  double eps = 0;
  double count = 0;      // values per channel, of all ranks
  at::Tensor mean, var;  // (C), float64, on the CPU; the variance is the biased one
};

at::ScalarType compute_type(const at::Tensor& input) {
  return input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// An undefined tensor stays undefined.
at::Tensor cast(const at::Tensor& tensor, at::ScalarType type) {
  return tensor.defined() ? tensor.to(type) : tensor;
}

at::Tensor like(const at::Tensor& tensor, const at::Tensor& model) {
  return tensor.to(model.options());
}

// Fills in count, mean and var. Every rank combines the same numbers in the same order.
void gather_moments(const at::Tensor& input, BatchMoments& moments) {
  const int64_t channels = input.size(1);
  const auto ranks = static_cast<int64_t>(moments.group.size());
  // Rows: mean, variance, count; a count for every channel, because it is cheap and simple.
  const at::Tensor mine = at::zeros({3, channels}, at::kDouble);
  if (input.numel() > 0) {
    const auto [mean, var] = at::batch_norm_update_stats(input, {}, {}, 0.0);
    mine[0].copy_(mean);
    mine[1].copy_(var);
    mine[2].fill_(static_cast<double>(input.numel() / channels));
  }
  const at::Tensor all = at::empty({ranks, 3, channels}, at::kDouble);
  comm::all_gather(all, mine, moments.group, {.tag = moments.name + " moments"}).wait();

  moments.mean = at::zeros({channels}, at::kDouble);
  moments.var = at::zeros({channels}, at::kDouble);
  const auto values = all.accessor<double, 3>();
  double* mean = moments.mean.data_ptr<double>();
  double* var = moments.var.data_ptr<double>();
  for (int64_t r = 0; r < ranks; ++r) moments.count += values[r][2][0];
  if (moments.count <= 1) {
    throw ConfigError(format(
        "[{}] the batches of {} ranks have {} values per channel, must be more than 1 in training",
        moments.name, ranks, moments.count));
  }
  for (int64_t c = 0; c < channels; ++c) {
    for (int64_t r = 0; r < ranks; ++r) mean[c] += values[r][2][c] * values[r][0][c];
    mean[c] /= moments.count;
    for (int64_t r = 0; r < ranks; ++r) {
      const double shift = values[r][0][c] - mean[c];
      var[c] += values[r][2][c] * (values[r][1][c] + shift * shift);
    }
    var[c] /= moments.count;
  }
}

// (x - mean) / sqrt(var + eps) * weight + bias per channel, by torch's kernel for given statistics:
// as fast as its batch norm, on every device, for every memory format.
at::Tensor normalise(const at::Tensor& x, const BatchMoments& moments, const at::Tensor& weight,
                     const at::Tensor& bias) {
  return std::get<0>(at::native_batch_norm(x, like(weight, x), like(bias, x), like(moments.mean, x),
                                           like(moments.var, x), false, 0.0, moments.eps));
}

// Its gradient goes through mean and var too, and so to the inputs of all ranks.
class NormaliseBatch : public torch::autograd::Function<NormaliseBatch> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input,
                            const at::Tensor& weight, const at::Tensor& bias,
                            const c10::intrusive_ptr<BatchMoments>& moments) {
    context->save_for_backward({input, weight});
    context->saved_data["moments"] = c10::IValue::make_capsule(moments);
    if (input.numel() == 0) return input.clone();
    return normalise(input.to(compute_type(input)), *moments, weight, bias).to(input.scalar_type());
  }

  // With n values per channel and xhat the normalised input,
  //   dx = weight / std * (dy - sum(dy) / n - xhat * sum(dy * xhat) / n),
  // where the sums are over all ranks.
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto holder = context->saved_data["moments"].toCapsule();
    const auto& moments = static_cast<const BatchMoments&>(*holder);
    if (c10::GradMode::is_enabled()) {
      throw Error(format("[{}] has no second derivative: backward was called with create_graph",
                         moments.name));
    }
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &input = saved[0], &weight = saved[1];
    const at::Tensor x = input.to(compute_type(input)), dy = gradients[0].to(x.scalar_type());

    at::Tensor sum_dy_xhat = at::zeros(weight.sizes(), x.options());
    at::Tensor sum_dy = at::zeros(weight.sizes(), x.options());
    if (x.numel() > 0) {
      std::tie(std::ignore, sum_dy_xhat, sum_dy) = at::native_batch_norm_backward(
          dy, x, like(weight, x), like(moments.mean, x), like(moments.var, x), {}, {}, false,
          moments.eps, {false, true, true});
    }
    const at::Tensor weight_gradient = sum_dy_xhat.to(weight.scalar_type());
    const at::Tensor bias_gradient = sum_dy.to(weight.scalar_type());
    if (!context->needs_input_grad(0)) return {{}, weight_gradient, bias_gradient, {}};

    const at::Tensor sums = at::stack({sum_dy_xhat, sum_dy}).to(at::kCPU, at::kDouble);
    comm::all_reduce(sums, moments.group, {.tag = moments.name + " gradient"}).wait();
    if (x.numel() == 0) return {at::zeros_like(input), weight_gradient, bias_gradient, {}};

    // What of dx depends on x, xhat * slope + offset, is a batch norm again.
    const at::Tensor scale = weight.to(at::kCPU, at::kDouble) * (moments.var + moments.eps).rsqrt();
    const at::Tensor slope = scale * sums[0] / -moments.count;
    const at::Tensor offset = scale * sums[1] / -moments.count;
    std::vector<int64_t> per_channel(static_cast<size_t>(x.dim()), 1);
    per_channel[1] = -1;
    const at::Tensor dx =
        normalise(x, moments, slope, offset).addcmul_(dy, like(scale, x).view(per_channel));
    return {dx.to(input.scalar_type()), weight_gradient, bias_gradient, {}};
  }
};

}  // namespace

SyncBatchNormImpl::SyncBatchNormImpl(int64_t num_features, comm::Group group,
                                     SyncBatchNormOptions options)
    : num_features(num_features), group(std::move(group)), options(std::move(options)) {
  if (num_features <= 0) {
    throw ConfigError(
        format("[{}] num_features is {}, must be more than 0", this->options.name, num_features));
  }
  reset();
}

void SyncBatchNormImpl::reset() {
  const bool affine = options.affine, tracked = options.track_running_stats;
  const auto per_channel = [&](bool wanted, double value) {
    return wanted ? at::full({num_features}, value, at::kFloat) : at::Tensor();
  };
  weight = register_parameter("weight", per_channel(affine, 1), affine);
  bias = register_parameter("bias", per_channel(affine, 0), affine);
  running_mean = register_buffer("running_mean", per_channel(tracked, 0));
  running_var = register_buffer("running_var", per_channel(tracked, 1));
  num_batches_tracked =
      register_buffer("num_batches_tracked", tracked ? at::zeros({}, at::kLong) : at::Tensor());
}

void SyncBatchNormImpl::reset_running_stats() {
  if (!options.track_running_stats) return;
  running_mean.zero_();
  running_var.fill_(1);
  num_batches_tracked.zero_();
}

at::Tensor SyncBatchNormImpl::forward(const at::Tensor& input) {
  check_input(input);
  if (is_training()) return normalise_with_group(input);
  const at::ScalarType type = compute_type(input);
  return at::batch_norm(input.to(type), cast(weight, type), cast(bias, type),
                        cast(running_mean, type), cast(running_var, type),
                        !options.track_running_stats, 0.0, options.eps,
                        at::globalContext().userEnabledCuDNN())
      .to(input.scalar_type());
}

at::Tensor SyncBatchNormImpl::normalise_with_group(const at::Tensor& input) {
  auto moments = c10::make_intrusive<BatchMoments>();
  moments->group = group;
  moments->name = options.name;
  moments->eps = options.eps;
  {
    const at::NoGradGuard no_grad;
    gather_moments(input.to(compute_type(input)), *moments);
    if (options.track_running_stats) {
      num_batches_tracked += 1;
      const double momentum =
          options.momentum ? *options.momentum : 1.0 / num_batches_tracked.item<double>();
      const auto update = [&](at::Tensor& running, const at::Tensor& value) {
        running.mul_(1 - momentum).add_(value.to(running.options()), momentum);
      };
      update(running_mean, moments->mean);
      update(running_var, moments->var * (moments->count / (moments->count - 1)));
    }
  }
  const bool affine = options.affine;
  const auto constant = input.options().dtype(compute_type(input)).requires_grad(false);
  return NormaliseBatch::apply(input, affine ? weight : at::ones({num_features}, constant),
                               affine ? bias : at::zeros({num_features}, constant),
                               std::move(moments));
}

void SyncBatchNormImpl::check_input(const at::Tensor& input) const {
  if (input.dim() < 2 || input.dim() > 5 || input.size(1) != num_features ||
      !input.is_floating_point()) {
    throw ConfigError(format(
        "[{}] input is ({}) of {}, must be (N, {}) with up to three more dimensions, of floating "
        "point",
        options.name, join(input.sizes()), c10::toString(input.scalar_type()), num_features));
  }
}

void SyncBatchNormImpl::pretty_print(std::ostream& stream) const {
  stream << format(
      "lockstep::nn::SyncBatchNorm({}, eps={}, momentum={}, affine={}, track_running_stats={}, "
      "ranks={})",
      num_features, options.eps, options.momentum ? format("{}", *options.momentum) : "none",
      options.affine, options.track_running_stats, group.size());
}

SyncBatchNorm detail::sync_batch_norm(const torch::nn::Module& source,
                                      const torch::nn::BatchNormOptions& options, comm::Group group,
                                      std::string name) {
  const auto momentum = options.momentum();
  SyncBatchNorm result(
      options.num_features(), std::move(group),
      SyncBatchNormOptions{.eps = options.eps(),
                           .momentum = momentum ? std::optional(*momentum) : std::nullopt,
                           .affine = options.affine(),
                           .track_running_stats = options.track_running_stats(),
                           .name = std::move(name)});
  const at::NoGradGuard no_grad;
  const auto copy = [](at::Tensor& target, const at::Tensor& value) {
    target.set_data(value.detach().clone());
    target.set_requires_grad(value.requires_grad());
  };
  const auto parameters = source.named_parameters(/*recurse=*/false);
  const auto buffers = source.named_buffers(/*recurse=*/false);
  auto own_parameters = result->named_parameters(false);
  auto own_buffers = result->named_buffers(false);
  for (auto& item : own_parameters) copy(item.value(), parameters[item.key()]);
  for (auto& item : own_buffers) copy(item.value(), buffers[item.key()]);
  result->train(source.is_training());
  return result;
}

}  // namespace lockstep::nn
