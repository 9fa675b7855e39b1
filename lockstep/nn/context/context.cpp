// SPDX-License-Identifier: Apache-2.0
#include "lockstep/nn/context/context.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "lockstep/comm/collectives.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/nn/autograd/capsule.h"
#include "lockstep/nn/autograd/one_derivative.h"

namespace lockstep::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct GatherContext : torch::autograd::Function<GatherContext> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& local, int64_t rows,
                            const comm::Group& group) {
    const int64_t ranks = group.size(), heads = local.size(1), width = local.size(3);
    const at::Tensor mine = local.contiguous();
    const at::Tensor all =
        at::empty({ranks, heads, rows, 2, local.size(2) / rows / 2, width}, local.options());
    comm::all_gather(all, mine, group, {.tag = "keys and values"}).wait();
    context->saved_data["rows"] = rows;
    save_value(*context, "group", group);
    // The second chunks of the ranks are in falling order.
    return at::cat({all.select(3, 0), all.select(3, 1).flip(0)})
        .permute({1, 2, 0, 3, 4})  // (K, B, 2 n, c, D)
        .reshape({1, heads, ranks * local.size(2), width});
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    require_one_derivative("gather_context");
    const auto group = saved_value<comm::Group>(*context, "group");
    const int64_t rows = context->saved_data["rows"].toInt(), ranks = group.size();
    const at::Tensor& grad = gradients[0];
    const int64_t heads = grad.size(1), width = grad.size(3), length = grad.size(2) / rows;
    const at::Tensor chunks = grad.to(grad.scalar_type() == at::kDouble ? at::kDouble : at::kFloat)
                                  .reshape({heads, rows, 2 * ranks, length / ranks / 2, width})
                                  .permute({2, 0, 1, 3, 4});
    const at::Tensor all =
        at::stack({chunks.narrow(0, 0, ranks), chunks.narrow(0, ranks, ranks).flip(0)}, 3)
            .contiguous();  // (n, K, B, 2, c, D)
    const at::Tensor mine = at::empty({1, heads, rows * length / ranks, width}, all.options());
    comm::reduce_scatter(mine, all, group, {.tag = "gradients of keys and values"}).wait();
    return {mine.to(grad.scalar_type()), at::Tensor(), at::Tensor()};
  }
};

}  // namespace

std::array<int64_t, 2> zig_zag_chunks(int ranks, int rank) {
  return {rank, 2 * int64_t{ranks} - 1 - rank};
}

std::vector<int64_t> context_places(int64_t length, int ranks, int rank) {
  const int64_t chunks = 2 * int64_t{ranks};
  if (length % chunks != 0) {
    throw ConfigError(
        format("rows of {} tokens on {} context-parallel ranks, must be a multiple of {}: {}",
               length, ranks, chunks, (length / chunks + 1) * chunks));
  }
  const int64_t chunk = length / chunks;
  std::vector<int64_t> places;
  for (const int64_t number : zig_zag_chunks(ranks, rank)) {
    for (int64_t i = 0; i < chunk; ++i) places.push_back(number * chunk + i);
  }
  return places;
}

at::Tensor gather_context(const at::Tensor& local, int64_t rows, const comm::Group& group) {
  return GatherContext::apply(local, rows, group);
}

}  // namespace lockstep::nn
