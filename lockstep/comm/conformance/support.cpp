// SPDX-License-Identifier: Apache-2.0
#include "lockstep/comm/conformance/support.h"

#include <ATen/ATen.h>

#include <limits>

#include "lockstep/comm/backend.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/memory/tensor_bytes.h"

namespace lockstep::comm::conformance {

void verify(bool condition, const std::string& what) {
  if (!condition) throw Error(what);
}

at::Tensor Ranks::contribution(int rank, int64_t count, DType dtype, int64_t first) const {
  const int64_t start = first + 3 * rank + 1;
  const at::Tensor numbers = at::arange(start, start + count, options(at::kLong)).bitwise_and_(3);
  return dtype == DType::boolean ? numbers.bitwise_and(1).to(at::kBool)
                                 : numbers.to(memory::to_scalar_type(dtype));
}

at::Tensor expected_reduction(const std::vector<at::Tensor>& parts, ReduceOp op) {
  const at::ScalarType type = parts[0].scalar_type();
  const at::Tensor stacked = at::stack(parts).to(at::kLong);
  switch (op) {
    case ReduceOp::sum:
      return type == at::kBool ? stacked.amax(0).to(type) : stacked.sum(0).to(type);
    case ReduceOp::product:
      return stacked.prod(0).to(type);
    case ReduceOp::min:
      return stacked.amin(0).to(type);
    case ReduceOp::max:
      return stacked.amax(0).to(type);
    case ReduceOp::avg:
      break;
  }
  if (c10::isFloatingType(type)) {
    const at::ScalarType wide = type == at::kDouble ? at::kDouble : at::kFloat;
    return stacked.sum(0).to(wide).div(static_cast<int64_t>(parts.size())).to(type);
  }
  std::vector<at::Tensor> wide;
  for (const at::Tensor& part : parts) wide.push_back(part.to(at::kCPU, at::kLong).contiguous());
  at::Tensor averages = at::empty_like(wide[0]);
  for (int64_t i = 0; i < averages.numel(); ++i) {
    __extension__ __int128 sum = 0;
    for (const at::Tensor& part : wide) sum += part.data_ptr<int64_t>()[i];
    averages.data_ptr<int64_t>()[i] = static_cast<int64_t>(sum / static_cast<int>(parts.size()));
  }
  return averages.to(parts[0].options());
}

at::Tensor Ranks::near_limits(int rank, int64_t count, DType dtype) const {
  const auto [least, most] = [&]() -> std::pair<int64_t, int64_t> {
    switch (dtype) {
      case DType::int64:
        return {std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max()};
      case DType::int32:
        return {std::numeric_limits<int32_t>::min(), std::numeric_limits<int32_t>::max()};
      case DType::int8:
        return {-128, 127};
      default:
        return {0, 255};
    }
  }();
  const int64_t values[] = {most, least, most - 1, least + 1, most / 2, least / 2, 1};
  const at::Tensor numbers = at::empty({count}, at::kLong);
  for (int64_t i = 0; i < count; ++i) {
    // Every eighth element is the same on all ranks: then only the division could bring it back.
    const int64_t choice = i % 8 < 2 ? i % 8 : i + rank * (i / 7 % 3);
    numbers.data_ptr<int64_t>()[i] = values[choice % std::ssize(values)];
  }
  return numbers.to(options(memory::to_scalar_type(dtype)));
}

std::vector<at::Tensor> Ranks::contributions(int64_t count, DType dtype, int64_t first) const {
  std::vector<at::Tensor> parts;
  for (int each = 0; each < size(); ++each)
    parts.push_back(contribution(each, count, dtype, first));
  return parts;
}

double Ranks::tolerance(ReduceOp op, DType dtype) const {
  const bool on_device = uses_device_memory(*this, device_);
  if (op != ReduceOp::avg || !is_floating(dtype) || !on_device) return 0;
  switch (dtype) {
    case DType::float64:
      return 1e-14;
    case DType::float32:
      return 1e-6;
    case DType::float16:
      return 4e-3;
    default:
      return 3e-2;
  }
}

void verify_equal(const at::Tensor& actual, const at::Tensor& expected, const std::string& what,
                  double tolerance) {
  verify(actual.scalar_type() == expected.scalar_type() && actual.sizes() == expected.sizes(),
         what + ": wrong shape or dtype");
  if (at::equal(actual, expected)) return;
  if (tolerance > 0 && at::allclose(actual, expected, tolerance, tolerance)) return;
  const at::Tensor wrong = actual.ne(expected).reshape(-1).nonzero();
  const int64_t at = wrong[0].item<int64_t>();
  throw Error(format("{}: {} of {} elements are wrong, the first at {}: {} instead of {}", what,
                     wrong.size(0), actual.numel(), at, actual.reshape(-1)[at].item<double>(),
                     expected.reshape(-1)[at].item<double>()));
}

std::string label(const char* operation, DType dtype, int64_t count) {
  return format("{} of {} {}", operation, count, name_of(dtype));
}

}  // namespace lockstep::comm::conformance
