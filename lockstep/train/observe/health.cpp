// SPDX-License-Identifier: Apache-2.0
#include "lockstep/train/observe/health.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "lockstep/comm/collectives.h"

namespace lockstep::train {
namespace {

// Sums over the parameters of a layer, then maxima.
enum Column {
  kGradSquares,
  kGradNonzeros,
  kGradCount,
  kWeightSquares,
  kUpdateSquares,
  kSums,
  kGradMax = kSums,
  kWeightMax,
  kColumns
};

// "blocks.3.attention.qkv.weight" is of "blocks.3", "embed.weight" of "embed".
std::string layer_of(const std::string& parameter) {
  const size_t first = parameter.find('.');
  if (!parameter.starts_with("blocks.")) return parameter.substr(0, first);
  return parameter.substr(0, parameter.find('.', first + 1));
}

// The norm of this order: 0 counts what is not zero, infinity is the largest.
at::Tensor norm_of(const at::Tensor& tensor, double order) {
  return at::linalg_vector_norm(tensor.flatten(), order, {}, false, at::kDouble);
}
constexpr double kLargest = std::numeric_limits<double>::infinity();

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
  numbers_.clear();
  weights_.clear();
  counts_.assign(layers_.size(), 0);
  for (const auto& [name, tensor, parts] : pipeline.counted_parameters()) {
    const int64_t row = row_of(name);
    const at::Tensor grad = tensor.grad();
    // Copies of tied parameters have given their gradients away: they do not count.
    weights_.push_back(grad.defined() ? tensor.detach().clone() : at::Tensor());
    if (row < 0 || !grad.defined() || grad.numel() == 0) continue;
    counts_[static_cast<size_t>(row)] += static_cast<double>(grad.numel());
    numbers_.push_back({row, kGradSquares, norm_of(grad, 2).square()});
    numbers_.push_back({row, kGradNonzeros, norm_of(grad, 0)});
    numbers_.push_back({row, kGradMax, norm_of(grad, kLargest)});
  }
}

io::OrderedJson Health::after_update(const parallel::Pipeline& pipeline) {
  const at::NoGradGuard no_grad;
  const auto parameters = pipeline.counted_parameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    const int64_t row = row_of(parameters[i].name);
    const at::Tensor now = parameters[i].tensor.detach();
    if (row < 0 || now.numel() == 0 || !weights_[i].defined()) continue;
    numbers_.push_back({row, kWeightSquares, norm_of(now, 2).square()});
    numbers_.push_back({row, kUpdateSquares, norm_of(weights_[i].sub_(now), 2).square()});
    numbers_.push_back({row, kWeightMax, norm_of(now, kLargest)});
  }
  weights_.clear();
  const auto count = static_cast<int64_t>(layers_.size());
  const at::Tensor all_sums = at::zeros({count, kSums}, at::kDouble);
  const at::Tensor all_largest = at::zeros({count, kColumns - kSums}, at::kDouble);
  auto sums = all_sums.accessor<double, 2>();
  auto largest = all_largest.accessor<double, 2>();
  for (int64_t row = 0; row < count; ++row)
    sums[row][kGradCount] = counts_[static_cast<size_t>(row)];
  if (!numbers_.empty()) {
    std::vector<at::Tensor> values;
    for (const Number& number : numbers_) values.push_back(number.value);
    const at::Tensor fetched = at::stack(values).cpu();
    for (size_t i = 0; i < numbers_.size(); ++i) {
      const auto [row, column, value] = numbers_[i];
      const double found = fetched[static_cast<int64_t>(i)].item<double>();
      if (column < kSums) {
        sums[row][column] += found;
      } else {
        double& most = largest[row][column - kSums];
        most = std::isnan(found) ? found : std::max(most, found);
      }
    }
  }
  numbers_.clear();
  const comm::Group group = pipeline.counted_group();
  comm::all_reduce(all_sums, group, {.tag = "health"}).wait();
  comm::all_reduce(all_largest, group, {.op = comm::ReduceOp::max, .tag = "health"}).wait();
  io::OrderedJson fields{{"layers", layers_}};
  const auto add = [&](const char* name, double value) {
    fields[name].push_back(std::isfinite(value) ? io::OrderedJson(value) : io::OrderedJson());
  };
  for (int64_t row = 0; row < count; ++row) {
    const double weight = std::sqrt(sums[row][kWeightSquares]);
    add("grad_norm", std::sqrt(sums[row][kGradSquares]));
    add("grad_max", largest[row][kGradMax - kSums]);
    add("grad_zeros", 1 - sums[row][kGradNonzeros] / sums[row][kGradCount]);
    add("weight_norm", weight);
    add("weight_max", largest[row][kWeightMax - kSums]);
    add("update_ratio", std::sqrt(sums[row][kUpdateSquares]) / weight);
  }
  return fields;
}

}  // namespace lockstep::train
