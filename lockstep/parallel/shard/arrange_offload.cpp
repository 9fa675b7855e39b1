// SPDX-License-Identifier: Apache-2.0
#include "lockstep/parallel/shard/arrange_offload.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/control/rank_texts.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/system_memory.h"
#include "lockstep/layout/offload_plan.h"
#include "lockstep/memory/device_size.h"
#include "lockstep/parallel/tiers/update_site.h"

namespace lockstep::parallel::detail {
namespace {

using layout::Tier;

DType dtype_of(at::ScalarType dtype, const std::string& name) {
  if (dtype == at::kFloat) return DType::float32;
  if (dtype == at::kBFloat16) return DType::bfloat16;
  if (dtype == at::kHalf) return DType::float16;
  if (dtype == at::kDouble) return DType::float64;
  throw ConfigError(
      format("[offload] parameters of '{}' are {}, must be float64, float32, float16 or "
             "bfloat16",
             name, c10::toString(dtype)));
}

layout::OffloadFlat sizes_of(const FlatPlan& plan,
                             const std::function<bool(const std::string&)>& is_embedding) {
  const layout::FlatLayout layout = lay_out(plan);
  const int rank = plan.shard.rank();
  layout::OffloadFlat flat{.name = plan.name,
                           .unit = plan.unit,
                           .param = dtype_of(plan.dtype, plan.name),
                           .compute = dtype_of(plan.compute_dtype, plan.name),
                           .reduce = dtype_of(plan.reduce_dtype, plan.name),
                           .grad = dtype_of(plan.gradient_dtype, plan.name),
                           .num_parameters = static_cast<int64_t>(plan.parameters.size()),
                           .shard = layout.blocks[static_cast<size_t>(rank)].size(),
                           .size = layout.size,
                           .shared = plan.shard.size() > 1,
                           // What all units use (norms, biases) is small and does not come and go.
                           .stays = plan.shard.size() == 1 && plan.unit == kWholeTensors,
                           .trained = plan.trained};
  if (!plan.trained || flat.shard == 0) return flat;
  const auto embedding = [&](size_t i) { return is_embedding(plan.parameters[i].name); };
  if (!plan.updates_as_one) {
    std::vector<layout::Shape> shapes;
    for (const auto& parameter : plan.parameters) shapes.push_back(parameter.tensor.sizes().vec());
    flat.tensors = layout::optimized_tensors(shapes, layout, rank, embedding);
    return flat;
  }
  bool any = false;
  for (size_t i = 0; i < plan.parameters.size(); ++i) any = any || embedding(i);
  flat.tensors = {{.count = flat.shard, .embedding = any}};
  return flat;
}

// Ranks gather from each other's memory, so a parameter rests in the same tier on all of them: on
// the host if one of them wants that. Their shares, and so their plans, differ a little. Returns
// the bytes of gathered parameters that all of them have room for.
int64_t agree_on_parameters(const std::vector<FlatPlan>& plans, layout::OffloadPlan& plan) {
  const auto shared = std::find_if(plans.begin(), plans.end(),
                                   [](const FlatPlan& each) { return each.shard.size() > 1; });
  if (shared == plans.end()) return plan.used.params;
  const at::Tensor on_host = at::zeros({static_cast<int64_t>(plans.size())}, at::kLong);
  int64_t* const mine = on_host.data_ptr<int64_t>();
  for (size_t i = 0; i < plans.size(); ++i) mine[i] = plan.flats[i].params == Tier::host;
  comm::all_reduce(on_host, shared->shard,
                   {.op = comm::ReduceOp::max, .tag = "where parameters rest"})
      .wait();
  layout::move_to_host(plan, std::vector<bool>(mine, mine + plans.size()));
  const at::Tensor room = at::full({1}, plan.used.params, at::kLong);
  comm::all_reduce(room, shared->shard,
                   {.op = comm::ReduceOp::min, .tag = "room for gathered parameters"})
      .wait();
  return room.item<int64_t>();
}

}  // namespace

std::shared_ptr<OffloadTiers> arrange_offload(
    std::vector<FlatPlan>& plans, const layout::OffloadOptions& options, const comm::Group& group,
    const std::function<bool(const std::string& name)>& is_embedding) {
  c10::Device device = at::kCPU;
  for (const FlatPlan& plan : plans) device = plan.device;
  const auto wanted = layout::resolved(options, memory::device_bytes(device),
                                       static_cast<int64_t>(available_memory()));
  layout::validate(wanted);
  auto tiers = std::make_shared<OffloadTiers>(wanted, device,
                                              group.members()[static_cast<size_t>(group.rank())]);
  layout::OffloadMachine machine = layout::offload_machine(wanted, device.is_cuda());
  check(tiers->device_memory.rounded(1) == static_cast<size_t>(machine.device_grain) &&
            memory::HostMemory::rounded(1) == static_cast<size_t>(machine.host_grain),
        "memory is taken in the grains that are planned with");
  if (std::ranges::any_of(plans, &FlatPlan::trained))
    machine.site = choose_site(tiers, layout::slice_elements(wanted, device.is_cuda()));
  tiers->site = machine.site;
  layout::OffloadPlan plan;
  // Shares differ a little, and so does what ranks need.
  comm::run_on_all_ranks("fully_shard", group, [&] {
    std::vector<layout::OffloadFlat> flats;
    for (const FlatPlan& each : plans) flats.push_back(sizes_of(each, is_embedding));
    plan = layout::plan_offload(std::move(flats), wanted, machine);
    return std::string();
  });
  tiers->line_room = static_cast<size_t>(agree_on_parameters(plans, plan));
  tiers->state_room = {"offload.host_budget",
                       static_cast<size_t>(std::max<int64_t>(plan.state_room, 1))};
  tiers->ring_bytes = plan.used.states > 0 ? static_cast<size_t>(plan.ring) : 0;
  for (size_t i = 0; i < plans.size(); ++i) {
    const layout::OffloadPlan::Flat& placed = plan.flats[i];
    plans[i].resident = plans[i].whole_gradients = false;
    plans[i].offload = {.tiers = tiers,
                        .params = placed.params,
                        .grads = placed.grads,
                        .param_codec = placed.param_codec,
                        .grad_codec = placed.grad_codec,
                        .states = placed.states};
    for (const auto& parameter : plans[i].parameters)
      plans[i].offload->embeddings.push_back(is_embedding(parameter.name));
    if (placed.grad_codec == codec::Codec::bf16) plans[i].gradient_dtype = at::kBFloat16;
    if (placed.params == Tier::host) plans[i].rest_device = at::kCPU;
  }
  tiers->plan = std::move(plan);
  return tiers;
}

}  // namespace lockstep::parallel::detail
