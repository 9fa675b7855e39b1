// SPDX-License-Identifier: Apache-2.0
#include "lockstep/parallel/shard/consumed_norm.h"

#include <ATen/ATen.h>

#include <cmath>

#include "lockstep/comm/collectives.h"
#include "lockstep/core/error.h"
#include "lockstep/parallel/shard/engine.h"
#include "lockstep/parallel/shard/sharded_model_state.h"

namespace lockstep::parallel::detail {

void require_clipping(const ShardedModel& model) {
  const auto& engine = model.shared()->engine;
  if (engine && engine->tiers() && engine->tiers()->updates_in_backward()) {
    throw ConfigError(
        "[clip_grad_norm_] clip_mode none updates parameters in backward, before the norm of all "
        "gradients is known: ask for grad_norm(), or choose clip_mode exact");
  }
}

double consumed_norm(const ShardEngine& engine) {
  auto& norms = engine.tiers()->consumed;
  const at::Tensor sum = at::zeros({1}, at::kDouble);
  if (!norms.empty()) sum[0] = at::stack(norms).square().sum().to(at::kCPU);
  norms.clear();
  comm::all_reduce(sum, engine.groups().reduce, {.tag = "grad norm"}).wait();
  return std::sqrt(*sum.data_ptr<double>());
}

}  // namespace lockstep::parallel::detail
