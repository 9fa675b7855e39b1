// SPDX-License-Identifier: Apache-2.0
#include "lockstep/optim/tensor_memory.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "lockstep/optim/kernels/blocks.h"
#include "lockstep/optim/parameters/placed_runs.h"

namespace lockstep::optim::detail {
namespace {

MomentDraws draws_of(const PlacedRuns& runs, const Update& update, uint64_t seed) {
  return {.key = random_key(seed, "moments", runs.tensor, {.step = update.step}),
          .first = runs.first,
          .length = runs.length,
          .stride = runs.stride};
}

// Operands of the elements from `begin` on.
Operands operands_from(const Update& update, int64_t begin) {
  Operands operands = operands_of(update);
  const auto advance = [begin]<class T>(T*& memory, const at::Tensor& tensor) {
    if (memory == nullptr) return;
    const auto bytes = static_cast<uintptr_t>(begin * tensor.element_size());
    memory = reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(memory) + bytes);
  };
  advance(operands.param, update.param);
  advance(operands.grad, update.grad);
  advance(operands.master, update.weight());
  advance(operands.first, update.buffers[0]);
  advance(operands.second, update.buffers[1]);
  return operands;
}

}  // namespace

std::optional<DType> dtype_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kDouble:
      return DType::float64;
    case at::kFloat:
      return DType::float32;
    case at::kHalf:
      return DType::float16;
    case at::kBFloat16:
      return DType::bfloat16;
    default:
      return std::nullopt;
  }
}

bool same_layout(const at::Tensor& a, const at::Tensor& b) {
  if (a.sizes() != b.sizes()) return false;
  for (int64_t dim = 0; dim < a.dim(); ++dim) {  // the stride of a single row does not matter
    if (a.size(dim) > 1 && a.stride(dim) != b.stride(dim)) return false;
  }
  return true;
}

Operands operands_of(const Update& update) {
  const auto memory = [](const at::Tensor& tensor) {
    return tensor.defined() ? tensor.data_ptr() : nullptr;
  };
  const auto buffer = [&](size_t i) {
    return i < update.buffers.size() ? memory(update.buffers[i]) : nullptr;
  };
  return {.param = memory(update.param),
          .grad = memory(update.grad),
          .master = memory(update.master),
          .first = buffer(0),
          .second = buffer(1)};
}

std::vector<RoundedPart> rounded_parts(const Update& update, uint64_t seed) {
  std::vector<RoundedPart> parts;
  for (const PlacedRuns& runs : *update.places) {
    parts.push_back({.operands = operands_from(update, runs.begin),
                     .begin = runs.begin,
                     .end = runs.begin + runs.count,
                     .draws = draws_of(runs, update, seed)});
  }
  return parts;
}

void store_rounded(const Update& update, uint64_t seed, const at::Tensor& exp_avg,
                   const at::Tensor& exp_avg_sq) {
  const auto on_cpu = [](const at::Tensor& values) { return values.to(at::kCPU).contiguous(); };
  const at::Tensor means = on_cpu(exp_avg), squares = on_cpu(exp_avg_sq);
  const auto zeros = [&] { return at::zeros_like(means, at::kBFloat16); };
  const at::Tensor rounded_means = zeros(), rounded_squares = zeros();
  const auto* const mean = means.data_ptr<float>();
  const auto* const square = squares.data_ptr<float>();
  auto* const rounded_mean = static_cast<uint16_t*>(rounded_means.data_ptr());
  auto* const rounded_square = static_cast<uint16_t*>(rounded_squares.data_ptr());
  for (const PlacedRuns& runs : *update.places) {
    const MomentDraws draws = draws_of(runs, update, seed);
    at::parallel_for(0, runs.count, Blocks::kElements, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const uint32_t word = random_word(draws.key, static_cast<uint64_t>(draws.place(i)));
        const int64_t at = runs.begin + i;
        rounded_mean[at] = stochastic_bfloat16(mean[at], for_exp_avg(word));
        rounded_square[at] = stochastic_bfloat16(square[at], for_exp_avg_sq(word));
      }
    });
  }
  update.buffers[0].copy_(rounded_means);
  update.buffers[1].copy_(rounded_squares);
}

}  // namespace lockstep::optim::detail
