// SPDX-License-Identifier: Apache-2.0
#include "lockstep/optim/gradient_passes.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/version.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <unordered_set>
#include <utility>

#include "lockstep/comm/collectives.h"
#include "lockstep/optim/kernels/blocks.h"
#include "lockstep/optim/tensor_memory.h"

namespace lockstep::optim {

namespace {

// Operators on no elements come to it.
bool has_owner(const at::Tensor& gradient) {
  return gradient.key_set().has(c10::DispatchKey::DeferredInit);
}

}  // namespace

void announce_read(const at::Tensor& gradient) {
  if (has_owner(gradient)) gradient.as_strided({0}, {1}).sum();
}

void announce_done(const at::Tensor& gradient) {
  if (has_owner(gradient)) gradient.as_strided({0}, {1}).any();
}

namespace detail {
namespace {

double larger(double a, double b) { return a > b || std::isnan(a) ? a : b; }

// A norm of each tensor by torch's operators, all fetched from the device at once.
std::vector<double> norms_by_operators(std::span<const at::Tensor> tensors, NormType type) {
  if (tensors.empty()) return {};
  std::vector<at::Tensor> norms;
  const double order = type == NormType::l2 ? 2 : std::numeric_limits<double>::infinity();
#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 4)
  // A few kernels for all of them, where they are on one device.
  const auto alike = [&](const at::Tensor& tensor) {
    return tensor.device() == tensors[0].device() &&
           tensor.scalar_type() == tensors[0].scalar_type();
  };
  if (std::ranges::all_of(tensors, alike)) {
    norms =
        at::_foreach_norm(at::TensorList(tensors.data(), tensors.size()), order,
                          tensors[0].element_size() == 2 ? at::kFloat : tensors[0].scalar_type());
  }
#endif
  for (size_t i = norms.size(); i < tensors.size(); ++i) {
    const at::Tensor norm = at::linalg_vector_norm(tensors[i], order, {}, false, at::kDouble);
    norms.push_back(norm.to(tensors[0].device()));
  }
  const at::Tensor fetched = at::stack(norms).to(at::kCPU, at::kDouble);
  const double* first = fetched.data_ptr<double>();
  return {first, first + fetched.numel()};
}

bool is_memory(const at::Tensor& tensor) { return tensor.is_cpu() && dtype_of(tensor); }

double sum_over(double value, const comm::Group& group) {
  const at::Tensor sum = at::full({1}, value, at::kDouble);
  comm::all_reduce(sum, group, {.tag = "grad norm"}).wait();
  return *sum.data_ptr<double>();
}

// Magnitudes order like their bits, NaN above infinity; as numbers a NaN might be lost on the way.
double largest_over(double magnitude, const comm::Group& group) {
  const at::Tensor bits = at::full({1}, std::bit_cast<int64_t>(std::abs(magnitude)), at::kLong);
  comm::all_reduce(bits, group, {.op = comm::ReduceOp::max, .tag = "grad norm"}).wait();
  return std::bit_cast<double>(*bits.data_ptr<int64_t>());
}

}  // namespace

std::vector<at::Tensor> gradients_of(std::span<const at::Tensor> parameters) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> gradients;
  std::unordered_set<const c10::TensorImpl*> seen;  // Module::parameters() lists a tied one twice
  for (const at::Tensor& parameter : parameters) {
    at::Tensor& gradient = parameter.mutable_grad();
    if (!gradient.defined() || !seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
    if (gradient.is_sparse()) {
      gradient = gradient.coalesce();
      gradients.push_back(gradient._values());
    } else {
      gradients.push_back(gradient.detach());
    }
    if (gradients.back().numel() == 0) gradients.pop_back();
  }
  return gradients;
}

void for_each_part(std::span<const at::Tensor> gradients,
                   const std::function<void(std::span<const at::Tensor>)>& body) {
  const auto owner = [](const at::Tensor& gradient) -> const void* {
    return has_owner(gradient) ? gradient.storage().unsafeGetStorageImpl() : nullptr;
  };
  for (size_t begin = 0, end = 0; begin < gradients.size(); begin = end) {
    const void* const mine = owner(gradients[begin]);
    while (end < gradients.size() && owner(gradients[end]) == mine) ++end;
    announce_read(gradients[begin]);
    body(gradients.subspan(begin, end - begin));
    announce_done(gradients[begin]);
  }
}

namespace {

// Norms of blocks of those that are in memory follow `parts`; the others, `elsewhere`.
void add_norms(std::span<const at::Tensor> gradients, NormType type, std::vector<double>& parts,
               std::vector<at::Tensor>& elsewhere) {
  std::vector<at::Tensor> in_memory;
  std::vector<NormKernel> kernels;
  Blocks blocks;
  for (const at::Tensor& gradient : gradients) {
    if (!is_memory(gradient)) {
      elsewhere.push_back(gradient);
      continue;
    }
    in_memory.push_back(gradient.contiguous());  // elements in the order of their indices
    const auto find =
        type == NormType::l2 ? detail::kernels().sum_squares : detail::kernels().max_abs;
    kernels.push_back(find(*dtype_of(gradient)));
    blocks.add(gradient.numel());
  }
  const auto first = static_cast<int64_t>(parts.size());
  parts.resize(parts.size() + static_cast<size_t>(blocks.size()));
  blocks.for_each([&](const Block& block) {
    const void* data = in_memory[block.array].data_ptr();
    parts[first + block.index] = kernels[block.array](data, block.begin, block.end);
  });
}

}  // namespace

double norm_of(std::span<const at::Tensor> gradients, NormType type, const comm::Group& group) {
  const at::NoGradGuard no_grad;
  std::vector<double> parts;
  std::vector<at::Tensor> elsewhere;
  for_each_part(gradients,
                [&](std::span<const at::Tensor> part) { add_norms(part, type, parts, elsewhere); });
  for (const double norm : norms_by_operators(elsewhere, type)) {
    parts.push_back(type == NormType::l2 ? norm * norm : norm);
  }

  double total = 0;
  for (const double part : parts) total = type == NormType::l2 ? total + part : larger(total, part);
  return type == NormType::l2 ? std::sqrt(sum_over(total, group)) : largest_over(total, group);
}

namespace {

// Returns the tensors that have no kernel; the others are scaled, and `largest` is raised to the
// largest magnitude in them.
std::vector<at::Tensor> scale_memory(std::span<const at::Tensor> gradients, double factor,
                                     double& largest) {
  std::vector<at::Tensor> rest;
  std::vector<std::pair<ScaleKernel, void*>> arrays;
  Blocks blocks;
  for (const at::Tensor& gradient : gradients) {
    if (!is_memory(gradient) || !gradient.is_non_overlapping_and_dense()) {
      rest.push_back(gradient);
      continue;
    }
    arrays.emplace_back(kernels().scale(*dtype_of(gradient)), gradient.data_ptr());
    blocks.add(gradient.numel());
  }
  std::vector<double> parts(blocks.size());
  blocks.for_each([&](const Block& block) {
    const auto [run, data] = arrays[block.array];
    parts[block.index] = run(data, factor, block.begin, block.end);
  });
  for (const double part : parts) largest = larger(largest, part);
  return rest;
}

}  // namespace

void scale(std::span<const at::Tensor> gradients, double factor) {
  const at::NoGradGuard no_grad;
  double largest = 0;
  for_each_part(gradients, [&](std::span<const at::Tensor> part) {
    const std::vector<at::Tensor> rest = scale_memory(part, factor, largest);
    if (!rest.empty()) at::_foreach_mul_(rest, at::Scalar(factor));
  });
}

double scale_and_measure(std::span<const at::Tensor> gradients, double factor) {
  const at::NoGradGuard no_grad;
  double largest = 0;
  for_each_part(gradients, [&](std::span<const at::Tensor> part) {
    const auto rest = scale_memory(part, factor, largest);
    for (const at::Tensor& gradient : rest) gradient.mul_(factor);
    for (const double norm : norms_by_operators(rest, NormType::max))
      largest = larger(largest, norm);
  });
  return largest;
}

bool any_rank(bool mine, const comm::Group& group) {
  const at::Tensor flag = at::full({1}, mine ? 1 : 0, at::kByte);
  comm::all_reduce(flag, group, {.op = comm::ReduceOp::max, .tag = "skip step"}).wait();
  return flag.item<uint8_t>() != 0;
}

}  // namespace detail
}  // namespace lockstep::optim
