#include "lockstep/parallel/offload/arrange.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <map>

#include "lockstep/comm/collectives.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/system_memory.h"
#include "lockstep/memory/device_size.h"
#include "lockstep/parallel/offload/site.h"
#include "lockstep/parallel/offload/update_ring.h"

namespace lockstep::parallel::detail {
namespace {

using layout::Tier;

constexpr int64_t kSmall = 4096;  // elements: smaller tensors are not kept in 8 bits

DType packed_dtype(at::ScalarType dtype, const std::string& name) {
  if (dtype == at::kFloat) return DType::float32;
  if (dtype == at::kBFloat16) return DType::bfloat16;
  throw ConfigError(format("[offload] parameters of '{}' are {}, must be Float or BFloat16", name,
                           c10::toString(dtype)));
}

bool is_8_bit(codec::Codec codec) {
  return codec == codec::Codec::int8 || codec == codec::Codec::quantization;
}

// How a tensor's state is kept: what 8 bits would spoil stays whole.
StatePlan state_plan(const FlatPlan& plan, at::ScalarType gradient, int64_t count, bool embedding,
                     const layout::StateCodecs& codecs) {
  const auto chosen = [&](codec::Codec codec) {
    const bool kept = is_8_bit(codec) && (count < kSmall || embedding);
    return kept || codec == codec::Codec::lossless ? codec::Codec::none : codec;
  };
  return {.format = {.param = packed_dtype(plan.dtype, plan.name),
                     .grad = packed_dtype(gradient, plan.name),
                     .exp_avg = chosen(codecs.exp_avg),
                     .exp_avg_sq = chosen(codecs.exp_avg_sq)},
          .lossless = codecs.exp_avg == codec::Codec::lossless ||
                      codecs.exp_avg_sq == codec::Codec::lossless};
}

// Sizes of the tensors that the optimizer will see, and whether each is an embedding's.
struct Seen {
  int64_t count;
  bool embedding;
};

std::vector<Seen> optimized_sizes(const FlatPlan& plan, const layout::FlatLayout& layout,
                                  bool use_orig_params,
                                  const std::function<bool(const std::string&)>& is_embedding) {
  const auto rank = static_cast<size_t>(plan.shard.rank());
  if (!plan.trained || layout.blocks[rank].size() == 0) return {};
  const auto embedding = [&](size_t i) { return is_embedding(plan.parameters[i].name); };
  if (!use_orig_params) {
    bool any = false;
    for (size_t i = 0; i < plan.parameters.size(); ++i) any = any || embedding(i);
    return {{layout.blocks[rank].size(), any}};
  }
  std::vector<Seen> sizes;
  for (size_t i = 0; i < plan.parameters.size(); ++i) {
    const at::Tensor& tensor = plan.parameters[i].tensor;
    const int64_t row =
        tensor.dim() > 0 && tensor.size(0) > 0 ? tensor.numel() / tensor.size(0) : 1;
    for (const auto& [index, rows] : layout.rows[rank]) {
      if (static_cast<size_t>(index) == i && rows.size() > 0)
        sizes.push_back({rows.size() * row, embedding(i)});
    }
  }
  return sizes;
}

// Ranks gather from each other's memory, so a parameter rests in the same tier on all of them: on
// the host if one of them wants that. Their shares, and so their plans, differ a little.
void agree_on_parameters(const std::vector<FlatPlan>& plans, const std::vector<size_t>& unit_of,
                         layout::OffloadPlaces& places) {
  const auto shared = std::find_if(plans.begin(), plans.end(),
                                   [](const FlatPlan& plan) { return plan.shard.size() > 1; });
  if (shared == plans.end()) return;
  const at::Tensor on_host = at::zeros({static_cast<int64_t>(plans.size())}, at::kLong);
  int64_t* const mine = on_host.data_ptr<int64_t>();
  for (size_t i = 0; i < plans.size(); ++i) {
    mine[i] = unit_of[i] != SIZE_MAX && places.units[unit_of[i]].params == Tier::host;
  }
  comm::all_reduce(on_host, shared->shard,
                   {.op = comm::ReduceOp::max, .tag = "where parameters rest"})
      .wait();
  for (size_t i = 0; i < plans.size(); ++i) {
    if (mine[i] != 0) places.units[unit_of[i]].params = Tier::host;
  }
}

}  // namespace

size_t units_ahead(const std::vector<size_t>& parameters, int prefetch) {
  size_t units = 0, sum = 0;
  while (units < parameters.size() &&
         (units == 0 || sum + parameters[units] <= static_cast<size_t>(prefetch))) {
    sum += parameters[units++];
  }
  return units;
}

std::shared_ptr<OffloadTiers> arrange_offload(
    std::vector<FlatPlan>& plans, const FullyShardOptions& options, int rank,
    const std::function<bool(const std::string& name)>& is_embedding) {
  c10::Device device = at::kCPU;
  for (const FlatPlan& plan : plans) device = plan.device;
  const auto wanted = layout::resolved(*options.offload, memory::device_bytes(device),
                                       static_cast<int64_t>(available_memory()));
  layout::validate(wanted);
  auto tiers = std::make_shared<OffloadTiers>(wanted, device, rank);

  const auto rounded = [&](int64_t bytes) {
    return static_cast<int64_t>(tiers->device_memory.rounded(static_cast<size_t>(bytes)));
  };
  const int64_t slice = UpdateRing::slice_elements(wanted, device);
  tiers->site = choose_site(tiers, slice);
  std::vector<layout::OffloadUnit> units;
  std::vector<size_t> unit_of;  // per plan, in `units`; SIZE_MAX: it stays
  std::map<std::string, int64_t> lines;
  int64_t working = 0, largest_gradient = 0;
  RingNeed ring;
  for (FlatPlan& plan : plans) {
    plan.resident = plan.whole_gradients = false;
    plan.offload.emplace();
    FlatOffload& offload = *plan.offload;
    offload.tiers = tiers;
    const layout::FlatLayout layout = lay_out(plan);
    const int64_t count = layout.blocks[static_cast<size_t>(plan.shard.rank())].size();
    const auto bytes = [](int64_t elements, at::ScalarType dtype) {
      return elements * static_cast<int64_t>(c10::elementSize(dtype));
    };
    const at::ScalarType gradient =
        options.mixed_precision.keep_low_precision_grads ? plan.reduce_dtype : plan.dtype;
    for (const Seen& seen : optimized_sizes(plan, layout, options.use_orig_params, is_embedding)) {
      StatePlan state = state_plan(plan, gradient, seen.count, seen.embedding, wanted.codec);
      for (int64_t begin = 0; begin < seen.count; begin += slice)
        state.slices.push_back({begin, std::min(slice, seen.count - begin)});
      ring += UpdateRing::need(state, wanted);
      offload.states.push_back(std::move(state));
    }
    const int64_t params = rounded(bytes(count, plan.dtype));
    const int64_t gradient_line = rounded(bytes(layout.size, plan.reduce_dtype));
    // What all units use (norms, biases) is small and does not come and go.
    if (plan.shard.size() == 1 && plan.unit == kWholeTensors) {
      unit_of.push_back(SIZE_MAX);
      working += params + gradient_line;
      for (const StatePlan& state : offload.states) {
        for (const StateSlice& each : state.slices)
          working += rounded(
              static_cast<int64_t>(optim::detail::packed_layout(state.format, each.count).total));
      }
      continue;
    }
    unit_of.push_back(units.size());
    units.push_back({.name = plan.name});
    layout::OffloadUnit& unit = units.back();
    unit.params = params;
    unit.line = rounded(bytes(layout.size, plan.compute_dtype));
    if (plan.trained && !tiers->updates_in_backward()) unit.grads = rounded(bytes(count, gradient));
    for (const StatePlan& state : offload.states) {
      for (const StateSlice& each : state.slices) {
        const auto size =
            static_cast<int64_t>(optim::detail::packed_layout(state.format, each.count).total);
        // Updates on the CPU have a copy of the parameter there.
        const bool copies = tiers->site == layout::UpdateSite::cpu && !wanted.params;
        const auto kept = state.lossless ? static_cast<size_t>(size)
                                         : memory::HostMemory::rounded(static_cast<size_t>(size));
        unit.states.push_back(
            {.on_device = rounded(size),
             .on_host = static_cast<int64_t>(kept) + (copies ? bytes(each.count, plan.dtype) : 0)});
      }
    }
    lines[plan.unit] += unit.line;
    if (plan.trained) largest_gradient = std::max(largest_gradient, gradient_line);
  }
  // Lines of the unit in use and of the largest that may be fetched with it, where they come and
  // go; gradients on their way; the ring.
  const bool local = std::all_of(plans.begin(), plans.end(),
                                 [](const FlatPlan& plan) { return plan.shard.size() == 1; });
  int64_t lines_needed = 0;
  if (wanted.params || !local) {
    for (const auto& [name, bytes] : lines) lines_needed = std::max(lines_needed, bytes);
  }
  const bool transient = wanted.grads || !local || tiers->updates_in_backward();
  working += lines_needed;
  if (transient)
    working += static_cast<int64_t>(GradientMemory::num_blocks(tiers.get())) * largest_gradient;
  int64_t stays = 0;
  for (const layout::OffloadUnit& unit : units) {
    stays += (wanted.params ? 0 : unit.params) + (wanted.grads ? 0 : unit.grads);
  }
  tiers->ring_bytes = UpdateRing::bytes(ring, *tiers, wanted.device_limit - working - stays);
  working += rounded(static_cast<int64_t>(tiers->ring_bytes));
  layout::OffloadPlaces places = layout::place(units, working, wanted);
  agree_on_parameters(plans, unit_of, places);
  for (size_t i = 0; i < plans.size(); ++i) {
    if (unit_of[i] == SIZE_MAX) continue;
    const auto& unit = places.units[unit_of[i]];
    FlatOffload& offload = *plans[i].offload;
    offload.params = unit.params;
    offload.grads = unit.grads;
    if (offload.params == Tier::host) plans[i].rest_device = at::kCPU;
    size_t next = 0;
    for (StatePlan& state : offload.states) {
      for (StateSlice& each : state.slices) each.tier = unit.states[next++];
    }
  }
  return tiers;
}

}  // namespace lockstep::parallel::detail
