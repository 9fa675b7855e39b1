// SPDX-License-Identifier: Apache-2.0
#include "lockstep/parallel/data/sparse_average.h"

#include <ATen/ATen.h>

#include <memory>
#include <numeric>

#include "lockstep/comm/collectives.h"

namespace lockstep::parallel::detail {

std::function<at::Tensor()> begin_sparse_average(const at::Tensor& gradient,
                                                 const at::Tensor& shape, const comm::Group& group,
                                                 const std::string& tag) {
  at::Tensor indices, values;
  int64_t sparse_dim = 1;
  if (gradient.defined()) {
    const at::Tensor coalesced = gradient.coalesce();
    sparse_dim = coalesced.sparse_dim();
    indices = coalesced.indices();
    values = coalesced.values();
  } else {
    auto sizes = shape.sizes().vec();
    sizes[0] = 0;
    indices = at::empty({1, 0}, shape.options().dtype(at::kLong));
    values = at::empty(sizes, shape.options());
  }
  // (rank, {rows, sparse_dim}): how much each rank will send.
  const at::Tensor sizes = at::empty({group.size(), 2}, at::kLong);
  const at::Tensor mine = at::tensor({values.size(0), sparse_dim}, at::kLong);
  comm::Work counting = comm::all_gather(sizes, mine, group, {.tag = tag + " rows"});

  return [=]() mutable {
    counting.wait();
    std::vector<int64_t> rows;
    for (int rank = 0; rank < group.size(); ++rank) {
      rows.push_back(sizes[rank][0].item<int64_t>());
      sparse_dim = std::max(sparse_dim, sizes[rank][1].item<int64_t>());
    }
    // Indices travel one row of the tensor after another: (rows, sparse_dim).
    indices = indices.t().contiguous();
    if (indices.size(1) != sparse_dim) indices = indices.new_empty({0, sparse_dim});
    const int64_t total = std::accumulate(rows.begin(), rows.end(), int64_t{0});
    const int64_t row_size =
        shape.numel() == 0 ? 0
                           : std::accumulate(shape.sizes().begin() + sparse_dim,
                                             shape.sizes().end(), int64_t{1}, std::multiplies<>());
    const auto gather = [&](const at::Tensor& local, int64_t width, const char* what) {
      std::vector<int64_t> counts;
      for (const int64_t count : rows) counts.push_back(count * width);
      const at::Tensor all = at::empty({total, width}, local.options());
      comm::Work work =
          comm::all_gather(all, local.contiguous(), group, {.counts = counts, .tag = tag + what});
      return std::pair(all, work);
    };
    auto [all_indices, indices_work] = gather(indices, sparse_dim, " indices");
    auto [all_values, values_work] = gather(values, row_size, " values");
    indices_work.wait();
    values_work.wait();
    auto value_sizes = shape.sizes().slice(static_cast<size_t>(sparse_dim)).vec();
    value_sizes.insert(value_sizes.begin(), total);
    return at::sparse_coo_tensor(all_indices.t(), all_values.view(value_sizes).div_(group.size()),
                                 shape.sizes())
        .coalesce();
  };
}

}  // namespace lockstep::parallel::detail
