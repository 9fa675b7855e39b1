// SPDX-License-Identifier: Apache-2.0
// What plain engines cannot reduce, for groups larger than a test can have.
#include "lockstep/comm/reduction_lowering.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <vector>

#include "lockstep/memory/tensor_bytes.h"

namespace lockstep::comm::detail {
namespace {

__extension__ using Wide = __int128;

// The average over `ranks` ranks that all contribute what `part(rank)` says, as an engine would
// form it: it adds up the summands.
template <class T>
std::vector<T> average(DType dtype, int ranks, const std::vector<std::vector<T>>& parts) {
  std::vector<T> result;
  at::Tensor sum, output;
  std::function<void()> finish;
  std::shared_ptr<const void> memory;
  for (int rank = 0; rank < ranks; ++rank) {
    const auto& part = parts[static_cast<size_t>(rank) % parts.size()];
    at::Tensor data = at::empty({static_cast<int64_t>(part.size())}, memory::to_scalar_type(dtype));
    std::copy(part.begin(), part.end(), data.data_ptr<T>());
    Adapted form = adapt_reduction({.kind = fabric::OpKind::all_reduce,
                                    .reduce = fabric::ReduceOp::avg,
                                    .dtype = dtype,
                                    .input = memory::bytes_of(data),
                                    .output = memory::bytes_of(data),
                                    .count = data.numel()},
                                   std::make_shared<at::Tensor>(data), rank, ranks);
    EXPECT_EQ(form.operation.dtype, DType::int64);
    EXPECT_EQ(form.operation.reduce, fabric::ReduceOp::sum);
    const at::Tensor summands =
        at::from_blob(form.operation.output.data(), {form.operation.count}, at::kLong);
    if (rank > 0) {
      sum += summands;
    } else {
      sum = summands, output = data, finish = form.operation.finish, memory = form.memory;
    }
  }
  finish();
  return {output.data_ptr<T>(), output.data_ptr<T>() + output.numel()};
}

template <class T>
void expect_exact(DType dtype) {
  constexpr T kMost = std::numeric_limits<T>::max(), kLeast = std::numeric_limits<T>::min();
  const std::vector<std::vector<T>> parts{{kMost, kLeast, kMost, T(kLeast + 1), 3, T(-3)},
                                          {kMost, kLeast, T(kMost - 1), kLeast, 4, T(-4)},
                                          {kMost, kLeast, kLeast, T(kLeast + 5), 1, T(-1)}};
  for (const int ranks : {1, 2, 3, 7, 256, 300}) {
    const auto averages = average<T>(dtype, ranks, parts);
    for (size_t i = 0; i < averages.size(); ++i) {
      Wide sum = 0;
      for (int rank = 0; rank < ranks; ++rank) sum += parts[static_cast<size_t>(rank) % 3][i];
      EXPECT_EQ(averages[i], static_cast<T>(sum / ranks)) << ranks << " ranks, element " << i;
    }
  }
}

TEST(AdaptReduction, AveragesOfWholeNumbersAreExact) {
  expect_exact<int64_t>(DType::int64);
  expect_exact<int32_t>(DType::int32);
  expect_exact<int8_t>(DType::int8);
  expect_exact<uint8_t>(DType::uint8);
}

TEST(AdaptReduction, AnEmptyAverageIsEmpty) {
  for (const DType dtype : {DType::int64, DType::int8, DType::float16}) {
    Adapted form = adapt_reduction(
        {.kind = fabric::OpKind::all_reduce, .reduce = fabric::ReduceOp::avg, .dtype = dtype},
        nullptr, 0, 2);
    form.operation.finish();
    EXPECT_EQ(form.operation.count, 0);
  }
}

}  // namespace
}  // namespace lockstep::comm::detail
