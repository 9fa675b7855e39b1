// SPDX-License-Identifier: Apache-2.0
#include "lockstep/train/observe/health.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <cmath>

#include "lockstep/comm/collectives.h"

namespace lockstep::train {
namespace {

// Columns of sums_ and of largest_.
enum { kGradSquares, kGradZeros, kGradCount, kWeightSquares, kUpdateSquares, kSums };
enum { kGradMax, kWeightMax, kMaxima };

// "blocks.3.attention.qkv.weight" is of "blocks.3", "embed.weight" of "embed".
std::string layer_of(const std::string& parameter) {
  const size_t first = parameter.find('.');
  if (!parameter.starts_with("blocks.")) return parameter.substr(0, first);
  return parameter.substr(0, parameter.find('.', first + 1));
}

double squares(const at::Tensor& tensor) {
  const double norm =
      at::linalg_vector_norm(tensor.flatten(), 2, {}, false, at::kDouble).item<double>();
  return norm * norm;
}

}  // namespace

Health::Health(const config::ModelSpec& model) {
  for (const config::TensorSpec& tensor : model.tensors()) {
    const std::string layer = layer_of(tensor.name);
    if (rows_.emplace(layer, static_cast<int64_t>(layers_.size())).second) layers_.push_back(layer);
  }
}

int64_t Health::row_of(const std::string& parameter) const {
  const auto found = rows_.find(layer_of(parameter));
  return found == rows_.end() ? -1 : found->second;
}

void Health::before_update(const parallel::Pipeline& pipeline) {
  const at::NoGradGuard no_grad;
  const auto count = static_cast<int64_t>(layers_.size());
  sums_ = at::zeros({count, kSums}, at::kDouble);
  largest_ = at::zeros({count, kMaxima}, at::kDouble);
  weights_.clear();
  auto sums = sums_.accessor<double, 2>();
  auto largest = largest_.accessor<double, 2>();
  for (const auto& [name, tensor] : pipeline.counted_parameters()) {
    const int64_t row = row_of(name);
    const at::Tensor grad = tensor.grad();
    // Copies of tied parameters have given their gradients away: they do not count.
    weights_.push_back(grad.defined() ? tensor.detach().clone() : at::Tensor());
    if (row < 0 || !grad.defined() || grad.numel() == 0) continue;
    sums[row][kGradSquares] += squares(grad);
    sums[row][kGradZeros] +=
        static_cast<double>(grad.numel() - grad.count_nonzero().item<int64_t>());
    sums[row][kGradCount] += static_cast<double>(grad.numel());
    largest[row][kGradMax] = std::max(largest[row][kGradMax], grad.abs().max().item<double>());
  }
}

io::OrderedJson Health::after_update(const parallel::Pipeline& pipeline) {
  const at::NoGradGuard no_grad;
  auto sums = sums_.accessor<double, 2>();
  auto largest = largest_.accessor<double, 2>();
  const auto parameters = pipeline.counted_parameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    const int64_t row = row_of(parameters[i].name);
    const at::Tensor now = parameters[i].tensor.detach();
    if (row < 0 || now.numel() == 0 || !weights_[i].defined()) continue;
    sums[row][kWeightSquares] += squares(now);
    sums[row][kUpdateSquares] += squares(weights_[i].sub_(now));
    largest[row][kWeightMax] = std::max(largest[row][kWeightMax], now.abs().max().item<double>());
  }
  weights_.clear();
  const comm::Group group = pipeline.counted_group();
  comm::all_reduce(sums_, group, {.tag = "health"}).wait();
  comm::all_reduce(largest_, group, {.op = comm::ReduceOp::max, .tag = "health"}).wait();
  io::OrderedJson fields{{"layers", layers_}};
  const auto add = [&](const char* name, double value) {
    fields[name].push_back(std::isfinite(value) ? io::OrderedJson(value) : io::OrderedJson());
  };
  for (int64_t row = 0; row < sums_.size(0); ++row) {
    const double weight = std::sqrt(sums[row][kWeightSquares]);
    add("grad_norm", std::sqrt(sums[row][kGradSquares]));
    add("grad_max", largest[row][kGradMax]);
    add("grad_zeros", sums[row][kGradZeros] / sums[row][kGradCount]);
    add("weight_norm", weight);
    add("weight_max", largest[row][kWeightMax]);
    add("update_ratio", std::sqrt(sums[row][kUpdateSquares]) / weight);
  }
  return fields;
}

}  // namespace lockstep::train
