// SPDX-License-Identifier: Apache-2.0
// Matrices that no rank holds whole: cut them, change how they are cut, and multiply them. The
// product is compared with that of one process.
//
// $ lockstep run -n 2 build/bin/12_distributed_tensor
// [rank0]: 2 ranks; of A (6, 10) cut along dim 1 this one has (6, 5)
// [rank0]: A * B with A cut along rows needs no communication: the same numbers
// [rank0]: A * B with A and B cut along the common dim needs it: the same numbers
//
// $ lockstep run -n 4 build/bin/12_distributed_tensor
// [rank0]: 4 ranks; of A (6, 10) cut along dim 1 this one has (6, 3)
// [rank0]: A * B with A cut along rows needs no communication: the same numbers
// [rank0]: A * B with A and B cut along the common dim needs it: the same numbers
#include <torch/utils.h>

#include <cstdio>

#include "lockstep/lockstep.h"

using namespace lockstep;

int main() {
  const comm::Group world = comm::init();
  mesh::ModelParallelConfig config{.num_devices = world.size(), .strategy = mesh::Strategy::tensor};
  for (int id = 1; id < world.size(); ++id) config.device_ids.push_back(id);
  const mesh::ModelParallelContext context(config, world);

  // Here every rank has the whole matrices, to cut them and to compare. Whole numbers: all sums are
  // exact.
  torch::manual_seed(1);
  const at::Tensor a = torch::randint(-9, 10, {6, 10}, torch::kFloat);
  const at::Tensor b = torch::randint(-9, 10, {10, 4}, torch::kFloat);
  const at::Tensor expected = a.matmul(b);

  // A by columns. 10 over 4 ranks is 3, 3, 3, 1.
  const mesh::DistributedTensor columns = context.partition(a, {.dim = 1});
  if (world.rank() == 0)
    std::printf("%d ranks; of A (6, 10) cut along dim 1 this one has (%ld, %ld)\n", world.size(),
                static_cast<long>(columns.local_shape()[0]),
                static_cast<long>(columns.local_shape()[1]));
  const auto verdict = [&](const mesh::DistributedTensor& product) {
    return torch::equal(context.all_gather(product), expected) ? "the same numbers" : "wrong";
  };

  // By rows instead: one all-to-all, in which no rank sees more than it keeps. Each rank multiplies
  // its rows with B, and has these rows of the product.
  const mesh::DistributedTensor rows = context.redistribute(columns, 0);
  const mesh::DistributedTensor by_rows(rows.local().matmul(b), {6, 4}, 0, world);
  const char* const first = verdict(by_rows);
  if (world.rank() == 0)
    std::printf("A * B with A cut along rows %s communication: %s\n",
                rows.requires_communication(mesh::TensorOp::matmul_left) ? "needs" : "needs no",
                first);

  // B cut along the dimension that is summed over, as A is: no rank has a whole row or column. Each
  // multiplies its parts; the sum of these products over the ranks is cut along rows.
  const mesh::DistributedTensor b_rows = context.partition(b, {.dim = 0});
  const at::Tensor part = columns.local().matmul(b_rows.local());
  const char* const second = verdict(context.reduce_scatter(part, {.dim = 0}));
  if (world.rank() == 0)
    std::printf("A * B with A and B cut along the common dim %s it: %s\n",
                columns.requires_communication(mesh::TensorOp::matmul_left) ? "needs" : "needs no",
                second);
}
