// The norm of gradients that are gone when it is asked for.
#include <ATen/ATen.h>

#include <cmath>

#include "lockstep/comm/collectives.h"
#include "lockstep/parallel/shard/engine.h"

namespace lockstep::parallel::detail {

double consumed_norm(const ShardEngine& engine) {
  auto& norms = engine.tiers()->consumed;
  const at::Tensor sum = at::zeros({1}, at::kDouble);
  if (!norms.empty()) sum[0] = at::stack(norms).square().sum().to(at::kCPU);
  norms.clear();
  comm::all_reduce(sum, engine.groups().reduce, {.tag = "grad norm"}).wait();
  return std::sqrt(*sum.data_ptr<double>());
}

}  // namespace lockstep::parallel::detail
