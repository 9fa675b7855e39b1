// SPDX-License-Identifier: Apache-2.0
#include "lockstep/mesh/distributed_tensor.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>

#include "lockstep/mesh/mesh.h"
#include "tests/mesh/rank_checks.h"

namespace lockstep::mesh {
namespace {

using comm::Group;
using comm::run_threads;
using layout::Shape;

constexpr int kWorlds[] = {1, 2, 3, 4, 6, 8};
// Even, uneven and empty parts for every world; no elements at all; sizes of one; up to four dims.
const std::vector<Shape> kShapes = {{24},   {10},   {5},    {1},       {0},       {4, 6},
                                    {7, 3}, {1, 9}, {3, 0}, {2, 3, 5}, {8, 1, 4}, {3, 2, 4, 2}};

// Whole numbers small enough that every sum of them is exact.
at::Tensor numbered(const Shape& shape) {
  return at::arange(layout::numel_of(shape), at::kFloat).reshape(shape);
}

template <class Body>
void for_every_cut(Body body) {
  for (const int world : kWorlds) {
    run_threads(world, [&](Group group) {
      for (const auto& shape : kShapes) {
        for (int64_t dim = 0; dim < static_cast<int64_t>(shape.size()); ++dim) {
          body(numbered(shape), dim, group);
        }
      }
    });
  }
}

at::Tensor expected_shard(const at::Tensor& whole, int64_t dim, const Group& group) {
  const auto chunk = (whole.size(dim) + group.size() - 1) / group.size();
  const auto begin = std::min(whole.size(dim), chunk * group.rank());
  return whole.narrow(dim, begin, std::min(chunk, whole.size(dim) - begin));
}

TEST(DistributedTensor, PartitionByCeilingChunks) {
  run_threads(4, [](Group group) {
    const auto tensor = DistributedTensor::partition(numbered({10}), 0, group);
    const int64_t begin[] = {0, 3, 6, 9}, end[] = {3, 6, 9, 10};
    const int r = group.rank();
    require_equal(tensor.partition(), Partition{0, begin[r], end[r], 4, r});
    require_equal(tensor.global_shape(), Shape{10});
    require_equal(tensor.device(), at::Device(at::kCPU));
    require_same(tensor.local(), at::arange(begin[r], end[r], at::kFloat));
  });
  run_threads(4, [](Group group) {
    const auto tensor = DistributedTensor::partition(numbered({5, 2}), 0, group);
    const int64_t rows[] = {2, 2, 1, 0};
    require_equal(tensor.local().sizes().vec(), Shape{rows[group.rank()], 2});
  });
}

TEST(DistributedTensor, PartitionAndGather) {
  for_every_cut([](const at::Tensor& whole, int64_t dim, const Group& group) {
    const auto tensor = DistributedTensor::partition(whole, dim, group);
    require_same(tensor.local(), expected_shard(whole, dim, group));
    const auto gathered = tensor.all_gather();
    require_same(gathered, whole);
    require_equal(gathered.is_contiguous(), true);
    // Dimensions from the end are the same ones.
    const auto negative = DistributedTensor::partition(whole, dim - whole.dim(), group);
    require_equal(negative.partition(), tensor.partition());
  });
}

TEST(DistributedTensor, ReduceScatter) {
  for_every_cut([](const at::Tensor& whole, int64_t dim, const Group& group) {
    const int n = group.size();
    const auto contribution = whole * (group.rank() + 1) + group.rank();
    const auto sum = whole * (n * (n + 1) / 2) + n * (n - 1) / 2;
    const auto tensor = DistributedTensor::reduce_scatter(contribution, dim, group);
    require_same(tensor.local(), expected_shard(sum, dim, group));
    require_same(tensor.all_gather(), sum);
    require_same(contribution, whole * (group.rank() + 1) + group.rank());
  });
}

TEST(DistributedTensor, ReduceScatterWithAnotherReduction) {
  run_threads(3, [](Group group) {
    const auto whole = numbered({4, 5});
    const auto largest = DistributedTensor::reduce_scatter(whole + group.rank(), 1, group,
                                                           {.op = comm::ReduceOp::max});
    require_same(largest.all_gather(), whole + 2);
  });
}

TEST(DistributedTensor, RedistributeBetweenAllDims) {
  for_every_cut([](const at::Tensor& whole, int64_t dim, const Group& group) {
    const auto tensor = DistributedTensor::partition(whole, dim, group);
    for (int64_t to = -whole.dim(); to < whole.dim(); ++to) {
      const auto moved = tensor.redistribute(to);
      const auto expected = DistributedTensor::partition(whole, to, group);
      require_equal(moved.partition(), expected.partition());
      require_same(moved.local(), expected.local());
      require_same(moved.redistribute(dim).local(), tensor.local());
    }
  });
}

// What is computed on the shards is the shards of the result, where no communication is needed.
TEST(DistributedTensor, SaysWhatNeedsCommunication) {
  for (const int world : kWorlds) {
    run_threads(world, [](Group group) {
      for (const auto& shape : {Shape{12}, Shape{8, 9}, Shape{9, 8, 10}}) {
        const auto whole = numbered(shape);
        const auto dims = static_cast<int64_t>(shape.size());
        const auto left = numbered({3, shape[dims > 1 ? dims - 2 : 0]});  // times the tensor
        const auto right = numbered({shape.back(), 2});
        for (int64_t cut = 0; cut < dims; ++cut) {
          const auto tensor = DistributedTensor::partition(whole, cut, group);
          require_equal(tensor.local_shape(), tensor.local().sizes().vec());
          require_equal(DistributedTensor::local_shape(shape, cut - dims, group),
                        tensor.local_shape());
          const auto check = [&](TensorOp op, std::optional<int64_t> dim, auto compute) {
            if (tensor.requires_communication(op, dim)) return;
            const at::Tensor result = compute(whole);
            require_same(compute(tensor.local()),
                         group.size() == 1 ? result : expected_shard(result, cut, group));
          };
          check(TensorOp::elementwise, {}, [](const at::Tensor& t) { return t * 2 + 1; });
          check(TensorOp::reduce, {}, [](const at::Tensor& t) { return t.sum(); });
          for (int64_t dim = 0; dim < dims; ++dim) {
            check(TensorOp::reduce, dim, [&](const at::Tensor& t) { return t.cumsum(dim); });
            check(TensorOp::redistribute, dim, std::identity());
            require_equal(tensor.requires_communication(TensorOp::redistribute, dim),
                          group.size() > 1 && dim != cut);
            require_equal(tensor.requires_communication(TensorOp::reduce, dim - dims),
                          group.size() > 1 && dim == cut);
          }
          check(TensorOp::matmul_left, {}, [&](const at::Tensor& t) { return t.matmul(right); });
          check(TensorOp::matmul_right, {}, [&](const at::Tensor& t) { return left.matmul(t); });
          check(TensorOp::all_gather, {}, std::identity());
          // Not more than what must communicate does.
          require_equal(tensor.requires_communication(TensorOp::matmul_left),
                        group.size() > 1 && cut == dims - 1);
          require_equal(tensor.requires_communication(TensorOp::matmul_right),
                        group.size() > 1 && cut == std::max<int64_t>(dims - 2, 0));
          require_equal(tensor.requires_communication(TensorOp::reduce), group.size() > 1);
          require_equal(tensor.requires_communication(TensorOp::all_gather), group.size() > 1);
        }
      }
    });
  }
  const auto tensor = DistributedTensor::partition(numbered({4, 2}), 0, Group());
  require_refused([&] { tensor.requires_communication(TensorOp::redistribute); }, "needs the dim");
  require_refused([&] { tensor.requires_communication(TensorOp::elementwise, 0); },
                  "a dim ... none");
  require_refused([&] { tensor.requires_communication(TensorOp::reduce, 2); }, "split dim 2");
}

TEST(DistributedTensor, NonContiguousInputs) {
  for (const int world : kWorlds) {
    run_threads(world, [](Group group) {
      const auto turned = numbered({5, 4, 3}).permute({2, 0, 1});
      const auto strided = numbered({6, 10}).slice(1, 1, 10, 2);
      for (const auto& each : {turned, strided}) {
        for (int64_t dim = 0; dim < each.dim(); ++dim) {
          const auto tensor = DistributedTensor::partition(each, dim, group);
          require_equal(tensor.local().is_contiguous(), true);
          require_same(tensor.all_gather(), each);
          const auto sum = DistributedTensor::reduce_scatter(each, dim, group);
          require_same(sum.all_gather(), each * group.size());
        }
      }
    });
  }
}

TEST(DistributedTensor, OtherTypes) {
  run_threads(3, [](Group group) {
    for (const auto type : {at::kDouble, at::kHalf, at::kBFloat16, at::kLong, at::kInt, at::kChar,
                            at::kByte, at::kBool}) {
      const auto whole = numbered({4, 5}).to(type);
      const auto tensor = DistributedTensor::partition(whole, 1, group);
      require_same(tensor.all_gather(), whole);
      require_same(tensor.redistribute(0).all_gather(), whole);
    }
  });
}

TEST(DistributedTensor, ShardIsACopy) {
  const auto whole = numbered({4});
  const auto tensor = DistributedTensor::partition(whole, 0, Group());
  tensor.local().fill_(7);
  EXPECT_TRUE(at::equal(whole, numbered({4})));
}

TEST(DistributedTensor, AutogradIsLeftOut) {
  const auto whole = numbered({4, 2}).requires_grad_();
  const auto tensor = DistributedTensor::partition(whole, 1, Group());
  EXPECT_FALSE(tensor.local().requires_grad());
  EXPECT_FALSE(DistributedTensor::reduce_scatter(whole, 0, Group()).local().requires_grad());
  EXPECT_TRUE(at::equal(tensor.all_gather(), whole));
}

TEST(DistributedTensor, FromAShard) {
  run_threads(4, [](Group group) {
    const int64_t rows = group.rank() < 2 ? 2 : group.rank() == 2 ? 1 : 0;
    const DistributedTensor tensor(at::full({rows, 3}, float(group.rank())), {5, 3}, 0, group);
    const auto whole = tensor.all_gather();
    require_same(whole.select(1, 0), at::tensor({0.0f, 0.0f, 1.0f, 1.0f, 2.0f}));
    require_refused(
        [&] {
          DistributedTensor(at::zeros({3, 3}), {5, 3}, 0, group);
        },
        "shape (3, 3) ... (" + std::to_string(rows) + ", 3)");
  });
}

TEST(DistributedTensor, SharesAShardOfAnyStrides) {
  run_threads(2, [](Group group) {
    const auto turned = at::ones({3, 4});
    const auto alone = group.split(group.rank(), 0);
    const DistributedTensor tensor(turned.t(), {4, 3}, 0, alone);
    tensor.all_reduce(group).wait();
    require_same(turned, at::full({3, 4}, 2.0f));
    require_same(tensor.redistribute(1).all_gather(), turned.t());
  });
}

// Shards over tp, replicas over dp.
TEST(DistributedTensor, ShardsOfReplicas) {
  run_threads(6, [](Group group) {
    const Mesh mesh(group, {{"dp", 2}, {"tp", 3}});
    const auto whole = numbered({4, 2});
    const auto mine = whole * (mesh.coordinate("dp") + 1);
    const auto tensor = DistributedTensor::partition(mine, 0, mesh["tp"]);
    tensor.all_reduce(mesh["dp"]).wait();
    require_same(tensor.all_gather(), whole * 3);

    tensor.local().fill_(mesh.coordinate("dp"));
    tensor.broadcast(mesh["dp"], {.root = 1}).wait();
    require_same(tensor.all_gather(), at::ones({4, 2}));

    const auto placement = tensor.placement("layer.weight", "tp");
    placement.validate();
    require_equal(placement.local_shape(), tensor.local().sizes().vec());
    require_equal(placement.sharded_over, std::vector<std::string>{"tp"});
    require_equal(placement.slice.ranges[0].begin, tensor.partition().start);
  });
}

TEST(DistributedTensor, SendAndReceive) {
  run_threads(6, [](Group group) {
    const Mesh mesh(group, {{"pp", 2}, {"tp", 3}});
    const auto whole = numbered({4, 2});  // 2, 2 and 0 rows
    const bool first = mesh.coordinate("pp") == 0;
    const auto tensor =
        DistributedTensor::partition(first ? whole : at::zeros_like(whole), 0, mesh["tp"]);
    if (first) {
      tensor.send(1, mesh["pp"]).wait();
    } else {
      tensor.recv(0, mesh["pp"]).wait();
    }
    require_same(tensor.all_gather(), whole);
  });
}

TEST(DistributedTensor, SplitDimsOutsideAreRefused) {
  run_threads(2, [](Group group) {
    const auto whole = numbered({4, 6});
    const auto rank = "rank " + std::to_string(group.rank());
    require_refused(
        [&] { DistributedTensor::partition(whole, 2, group); },
        "[partition] " + rank + ": split dim 2 of shape (4, 6) ... at least -2 ... below 2");
    require_refused([&] { DistributedTensor::partition(whole, -3, group); }, "split dim -3");
    require_refused([&] { DistributedTensor::partition(at::ones({}), 0, group); },
                    "0-d tensor ... dim 0");
    require_refused([&] { DistributedTensor::reduce_scatter(whole, 5, group); },
                    "[reduce_scatter] " + rank + ": split dim 5");
    const auto tensor = DistributedTensor::partition(whole, 0, group);
    require_refused([&] { tensor.redistribute(-3); }, "[redistribute] " + rank + ": split dim -3");
    require_refused([&] { DistributedTensor(whole, {4, 6}, 7, group); }, "[distributed_tensor]");
  });
}

}  // namespace
}  // namespace lockstep::mesh
