// SPDX-License-Identifier: Apache-2.0
#include "lockstep/comm/reduction_lowering.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/div.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/stack.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <tuple>
#include <utility>

#include "lockstep/comm/float_order.h"
#include "lockstep/memory/tensor_bytes.h"

namespace lockstep::comm::detail {
namespace {

using fabric::Operation;
using fabric::ReduceOp;

constexpr int64_t kHalf = int64_t{1} << 32;

at::Tensor view_of(std::span<const std::byte> bytes, DType dtype, const c10::Device& on) {
  const auto options = at::TensorOptions().dtype(memory::to_scalar_type(dtype)).device(on);
  if (bytes.empty()) return at::empty({0}, options);  // from_blob refuses null
  return at::from_blob(const_cast<std::byte*>(bytes.data()),
                       {static_cast<int64_t>(bytes.size() / size_of(dtype))}, options);
}

// As what its elements are summed.
at::Tensor widened(const at::Tensor& numbers) {
  return numbers.is_floating_point() ? numbers.to(at::kFloat) : to_summand(numbers);
}

}  // namespace

std::function<void()> chain(std::function<void()> first, std::function<void()> second) {
  if (!first) return second;
  if (!second) return first;
  return [first = std::move(first), second = std::move(second)] {
    first();
    second();
  };
}

at::Tensor to_summand(const at::Tensor& numbers) {
  if (numbers.scalar_type() != at::kLong) return numbers.to(at::kLong);
  return at::stack({numbers.bitwise_right_shift(32), numbers.bitwise_and(kHalf - 1)}, -1)
      .view({2 * numbers.numel()});
}

at::Tensor to_average(const at::Tensor& sum, int64_t ranks, DType dtype) {
  if (dtype != DType::int64) return sum.div(ranks, "trunc").to(memory::to_scalar_type(dtype));
  // The whole sum is upper * 2^32 + lower, with lower in [0, 2^32) once what it has carried is
  // moved up. Long division by the ranks, rounded down; then a negative result that is not exact
  // goes up by one.
  const at::Tensor halves = sum.view({sum.numel() / 2, 2});
  const at::Tensor carried = halves.select(-1, 1);
  const at::Tensor upper = halves.select(-1, 0) + carried.bitwise_right_shift(32);
  const at::Tensor high = upper.div(ranks, "floor");
  const at::Tensor rest = (upper - high * ranks) * kHalf + carried.bitwise_and(kHalf - 1);
  const at::Tensor low = rest.div(ranks, "floor");
  const at::Tensor round_up = upper.lt(0).logical_and((rest - low * ranks).ne(0));
  return high * kHalf + low + round_up.to(at::kLong);
}

Adapted adapt_reduction(Operation operation, std::shared_ptr<const void> memory, int rank,
                        int group_size, const c10::Device& on) {
  const c10::AutoGradMode no_grad(false);
  const bool average = operation.reduce == ReduceOp::avg;
  if (average) operation.reduce = ReduceOp::sum;
  const bool keeps_result = operation.kind != fabric::OpKind::reduce || rank == operation.root;

  if (operation.dtype == DType::boolean) {
    operation.dtype = DType::uint8;
    operation.reduce = operation.reduce == ReduceOp::sum || operation.reduce == ReduceOp::max
                           ? ReduceOp::max
                           : ReduceOp::min;
  }
  const DType dtype = operation.dtype;
  const bool is_narrow_float = dtype == DType::float16 || dtype == DType::bfloat16;
  // On a device NCCL decides what a NaN does.
  const bool is_ordered = on.is_cpu() && is_floating(dtype) &&
                          (operation.reduce == ReduceOp::min || operation.reduce == ReduceOp::max);
  const at::Tensor output = view_of(operation.output, dtype, on);
  if (!is_ordered && !is_narrow_float && (!average || is_floating(dtype))) {
    if (average && keeps_result) {
      operation.finish = chain(
          [memory, output, group_size] {
            const c10::InferenceMode any_thread;
            at::Tensor(output).div_(group_size);
          },
          std::move(operation.finish));
    }
    return {std::move(operation), std::move(memory)};
  }

  const bool in_place = operation.input.data() == operation.output.data() &&
                        operation.input.size() == operation.output.size();
  at::Tensor input = view_of(operation.input, dtype, on);
  if (!is_ordered || is_narrow_float) input = widened(input);
  if (is_ordered) input = to_whole_order(input, operation.reduce == ReduceOp::max);
  const int64_t width = dtype == DType::int64 ? 2 : 1;  // summands of an element
  const at::Tensor sum = in_place ? input : at::empty({output.numel() * width}, input.options());
  operation.dtype = is_ordered        ? dtype == DType::float64 ? DType::int64 : DType::int32
                    : is_narrow_float ? DType::float32
                                      : DType::int64;
  operation.input = memory::bytes_of(input);
  operation.output = memory::bytes_of(sum);
  operation.count *= width;
  for (int64_t& count : operation.send_counts) count *= width;
  auto kept = std::make_shared<std::tuple<std::shared_ptr<const void>, at::Tensor, at::Tensor>>(
      std::move(memory), input, sum);
  if (keeps_result) {
    operation.finish = chain(
        [kept, sum, output, average, group_size, dtype, is_narrow_float, is_ordered] {
          const c10::InferenceMode any_thread;
          if (average && is_narrow_float) at::Tensor(sum).div_(group_size);
          at::Tensor(output).copy_(is_ordered        ? from_whole_order(sum)
                                   : is_narrow_float ? sum
                                                     : to_average(sum, group_size, dtype));
        },
        std::move(operation.finish));
  }
  return {std::move(operation), std::move(kept)};
}

Adapted adapt_reduction(Operation operation, std::shared_ptr<const void> memory, int rank,
                        int group_size) {
  return adapt_reduction(std::move(operation), std::move(memory), rank, group_size,
                         c10::Device(c10::kCPU));
}

}  // namespace lockstep::comm::detail
