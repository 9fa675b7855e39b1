// SPDX-License-Identifier: Apache-2.0
// The same bits on every backend, in the order of fabric/reduce.h.
#include "lockstep/comm/collectives.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/fabric/reduce.h"
#include "lockstep/memory/tensor_bytes.h"
#include "tests/support/says.h"

namespace lockstep::comm {
namespace {

using lockstep::test::says;

// Numbers whose sum depends on the order it is taken in.
at::Tensor part_of(int rank, int64_t count, at::ScalarType type) {
  return at::arange(count, at::kDouble).mul_(0.37 + rank).sin_().mul_(1e3).to(type);
}

at::Tensor expected_sum(int ranks, int64_t count, at::ScalarType type, ReduceOp op) {
  std::vector<at::Tensor> parts;
  std::vector<const std::byte*> inputs;
  for (int rank = 0; rank < ranks; ++rank) {
    parts.push_back(part_of(rank, count, type));
    inputs.push_back(memory::bytes_of(parts.back()).data());
  }
  const at::Tensor sum = at::empty({count}, type);
  std::byte* const output = memory::bytes_of(sum).data();
  fabric::reduce(memory::dtype_of(sum, "test"), op, {&output, 1}, inputs,
                 static_cast<size_t>(count));
  return sum;
}

class Ordered : public ::testing::TestWithParam<std::string> {
 protected:
  static void run(int ranks, const std::function<void(Group)>& body) {
    run_threads(ranks, body, {.backend = GetParam(), .check = true});
  }
};

TEST_P(Ordered, AllReduceIsTheTree) {
  for (const int ranks : {2, 3, 4}) {
    run(ranks, [&](const Group& group) {
      for (const auto type : {at::kFloat, at::kBFloat16}) {
        for (const ReduceOp op : {ReduceOp::sum, ReduceOp::avg}) {
          for (const int64_t count : {0, 1, 1001}) {
            const at::Tensor data = part_of(group.rank(), count, type);
            all_reduce_ordered(data, group, {.op = op}).wait();
            EXPECT_TRUE(at::equal(data, expected_sum(ranks, count, type, op)));
          }
        }
      }
      const at::Tensor columns = part_of(group.rank(), 1001, at::kFloat).view({7, 143}).t();
      all_reduce_ordered(columns, group).wait();
      EXPECT_TRUE(at::equal(columns.t().reshape({-1}),
                            expected_sum(ranks, 1001, at::kFloat, ReduceOp::sum)));
    });
  }
}

TEST_P(Ordered, ReduceScatterIsTheTree) {
  const std::vector<std::vector<int64_t>> cases = {{}, {7, 0, 500}, {0, 0, 3}, {1, 333, 2}};
  run(3, [&](const Group& group) {
    for (const auto type : {at::kFloat, at::kBFloat16}) {
      for (const ReduceOp op : {ReduceOp::sum, ReduceOp::avg}) {
        for (const auto& counts : cases) {
          int64_t total = 0, begin = 0, mine = 100;
          for (int rank = 0; rank < 3; ++rank) {
            const int64_t count = counts.empty() ? 100 : counts[static_cast<size_t>(rank)];
            if (rank == group.rank()) begin = total, mine = count;
            total += count;
          }
          const at::Tensor expected = expected_sum(3, total, type, op).narrow(0, begin, mine);
          const at::Tensor input = part_of(group.rank(), total, type), before = input.clone();
          const at::Tensor output = at::zeros({mine}, type);
          Work work = reduce_scatter_ordered(output, input, group, {.op = op, .counts = counts});
          work.wait();
          work.wait();
          EXPECT_TRUE(work.done());
          EXPECT_TRUE(at::equal(output, expected));
          EXPECT_TRUE(at::equal(input, before));
          // Into its own block.
          const at::Tensor block = input.narrow(0, begin, mine);
          reduce_scatter_ordered(block, input, group, {.op = op, .counts = counts}).wait();
          EXPECT_TRUE(at::equal(block, expected));
        }
      }
    }
  });
}

TEST_P(Ordered, ReduceScatterOfAnyStrides) {
  run(3, [](const Group& group) {
    const at::Tensor whole = part_of(group.rank(), 12 * 5, at::kFloat).view({12, 5});
    const at::Tensor input = whole.t().contiguous().t().requires_grad_();  // columns in memory
    const at::Tensor wide = at::zeros({4, 10}), output = wide.slice(1, 0, 10, 2);
    reduce_scatter_ordered(output, input, group).wait();
    const at::Tensor expected =
        expected_sum(3, 60, at::kFloat, ReduceOp::sum).view({3, 4, 5})[group.rank()];
    EXPECT_TRUE(at::equal(output, expected));
    EXPECT_TRUE(at::equal(wide.slice(1, 1, 10, 2), at::zeros({4, 5})));
  });
}

TEST_P(Ordered, SeveralInFlight) {
  run(3, [](const Group& group) {
    std::vector<at::Tensor> outputs;
    std::vector<Work> works;
    for (int64_t count = 1; count < 9; ++count) {
      outputs.push_back(at::empty({count}));
      works.push_back(reduce_scatter_ordered(outputs.back(),
                                             part_of(group.rank(), 3 * count, at::kFloat), group));
    }
    for (size_t i = 0; i < works.size(); ++i) {
      works[i].wait();
      const int64_t count = outputs[i].numel();
      EXPECT_TRUE(at::equal(outputs[i], expected_sum(3, 3 * count, at::kFloat, ReduceOp::sum)
                                            .narrow(0, group.rank() * count, count)));
    }
  });
}

TEST_P(Ordered, BadInputIsNamed) {
  run(2, [](const Group& group) {
    const auto refused = [&](const at::Tensor& output, const at::Tensor& input,
                             std::vector<int64_t> counts, const char* part) {
      try {
        reduce_scatter_ordered(output, input, group, {.counts = std::move(counts)}).wait();
        ADD_FAILURE() << "no error; expected: " << part;
      } catch (const ConfigError& error) {
        EXPECT_THAT(error.what(), says(part));
      }
    };
    refused(at::empty({2}), at::empty({5}), {}, "input has 5 elements");
    refused(at::empty({2}), at::empty({4}), {2, 2, 0}, "3 block counts ... group of 2");
    refused(at::empty({2}), at::empty({5}), {2, 2}, "elements");
    refused(at::empty({3}), at::empty({4}), {2, 2}, "elements");
    refused(at::empty({2}), at::empty({4}, at::kDouble), {}, "input is Double ... output is Float");
    refused(at::Tensor(), at::empty({4}), {}, "undefined");
  });
  EXPECT_THROW(run(2,
                   [](const Group& group) {
                     const at::Tensor flags = at::ones({4}, at::kBool);
                     reduce_scatter_ordered(flags.narrow(0, 0, 2), flags, group,
                                            {.op = ReduceOp::avg})
                         .wait();
                   }),
               ConfigError);
}

TEST(OrderedAlone, IsACopy) {
  const at::Tensor input = at::randn({5}), output = at::empty({5});
  reduce_scatter_ordered(output, input, Group()).wait();
  EXPECT_TRUE(at::equal(output, input));
}

INSTANTIATE_TEST_SUITE_P(, Ordered, ::testing::Values("thread", "gloo"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace lockstep::comm
