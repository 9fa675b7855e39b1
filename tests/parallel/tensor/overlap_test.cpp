// SPDX-License-Identifier: Apache-2.0
// In backward the gradient of a shared layer's input travels while that of its weight is computed:
// shown by the trace.
#include <gtest/gtest.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <cstdlib>

#include "lockstep/comm/group.h"
#include "lockstep/core/trace.h"
#include "lockstep/nn/init_model.h"
#include "lockstep/nn/linear.h"
#include "lockstep/parallel/tensor/tensor.h"
#include "tests/support/trace_spans.h"

namespace lockstep::test {
namespace {

constexpr size_t kTimes = 4;

// As in comm/overlap_test.cpp, whose main() sets LOCKSTEP_TRACE.
TEST(TensorOverlap, GradientsTravelBesideTheWeightsProduct) {
  for (const bool sequence : {false, true}) {
    comm::run_threads(2, [&](const comm::Group& group) {
      trace::name_thread(group.rank(), "rank");
      torch::nn::Sequential net;
      net->push_back("up", nn::Linear(1024, 2048));
      nn::initialize(*net, 1);
      parallel::tensor_parallel(*net, group, {{"up", layout::TensorStyle::column}},
                                {.sequence_parallel = sequence});
      const at::Tensor input = at::ones({1, sequence ? 512 : 1024, 1024}).requires_grad_();
      for (size_t i = 0; i < kTimes; ++i) net->forward(input).sum().backward();
    });
  }
  trace::flush();
  const auto events = read_trace(std::getenv("LOCKSTEP_TRACE"));
  // A sum begins when both ranks are there, beside the product of the one that comes last; on a
  // busy machine it may be over before that begins.
  bool sum_overlaps = false, parts_overlap = false;
  for (int rank = 0; rank < 2; ++rank) {
    const auto products = spans(events, rank, "weight gradient");
    const auto sums = spans(events, rank, "all_reduce", "tensor-parallel gradient");
    const auto parts = spans(events, rank, "reduce_scatter", "sum to parts of a sequence");
    ASSERT_EQ(products.size(), 2 * kTimes);
    ASSERT_EQ(sums.size(), kTimes);
    ASSERT_EQ(parts.size(), kTimes);
    for (size_t i = 0; i < kTimes; ++i) {
      sum_overlaps = sum_overlaps || overlap(sums[i], products[i]);
      parts_overlap = parts_overlap || overlap(parts[i], products[kTimes + i]);
    }
  }
  EXPECT_TRUE(sum_overlaps);
  EXPECT_TRUE(parts_overlap);
}

}  // namespace
}  // namespace lockstep::test
