#include "lockstep/comm/adapt.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/div.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/GradMode.h>

#include "lockstep/comm/tensor.h"

namespace lockstep::comm::detail {
namespace {

using fabric::Operation;
using fabric::ReduceOp;

at::Tensor view_of(std::span<const std::byte> bytes, DType dtype) {
  return at::from_blob(const_cast<std::byte*>(bytes.data()),
                       {static_cast<int64_t>(bytes.size() / size_of(dtype))},
                       at::TensorOptions().dtype(to_scalar_type(dtype)));
}

void divide(const at::Tensor& tensor, int64_t by) {
  const c10::AutoGradMode no_grad(false);
  if (tensor.is_floating_point()) {
    tensor.div_(by);
  } else {
    tensor.div_(by, "trunc");
  }
}

}  // namespace

Adapted adapt_reduction(Operation operation, std::shared_ptr<const void> memory, int rank,
                        int group_size) {
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
  if (operation.dtype == DType::float16 || operation.dtype == DType::bfloat16) {
    const at::Tensor wide_input = view_of(operation.input, operation.dtype).to(at::kFloat);
    const at::Tensor output = view_of(operation.output, operation.dtype);
    const bool in_place = operation.input.data() == operation.output.data() &&
                          operation.input.size() == operation.output.size();
    const at::Tensor wide_output = in_place ? wide_input : at::empty({output.numel()}, at::kFloat);
    operation.dtype = DType::float32;
    operation.input = bytes_of(wide_input);
    operation.output = bytes_of(wide_output);
    auto kept = std::make_shared<std::tuple<std::shared_ptr<const void>, at::Tensor, at::Tensor>>(
        std::move(memory), wide_input, wide_output);
    if (!keeps_result) return {std::move(operation), kept, {}};
    return {std::move(operation), kept, [kept, wide_output, output, average, group_size] {
              const c10::AutoGradMode no_grad_here(false);
              if (average) divide(wide_output, group_size);
              output.copy_(wide_output);
            }};
  }
  if (!average || !keeps_result) return {std::move(operation), std::move(memory), {}};
  const at::Tensor output = view_of(operation.output, operation.dtype);
  return {std::move(operation), memory,
          [memory, output, group_size] { divide(output, group_size); }};
}

}  // namespace lockstep::comm::detail
