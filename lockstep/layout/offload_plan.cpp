// SPDX-License-Identifier: Apache-2.0
#include "lockstep/layout/offload_plan.h"

#include <algorithm>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::layout {
namespace {

using codec::Codec;

constexpr int64_t kSmall = 4096;        // elements: smaller tensors are not kept in 8 bits
constexpr int64_t kGradientStages = 2;  // on the host

int64_t rounded(int64_t bytes, int64_t grain) {
  return (std::max<int64_t>(bytes, 1) + grain - 1) / grain * grain;
}
int64_t bytes_of(int64_t elements, DType dtype) {
  return elements * static_cast<int64_t>(size_of(dtype));
}
int64_t packed_bytes(const StatePlan& state, const StateSlice& slice) {
  return static_cast<int64_t>(codec::packed_layout(state.format, slice.count).total);
}

// What LZ4 makes of so many bytes, at most: more is known when they are there.
int64_t packed_bound(int64_t bytes, size_t width) {
  return static_cast<int64_t>(codec::compressed_bound(static_cast<size_t>(bytes), width));
}

bool is_8_bit(Codec codec) { return codec == Codec::int8 || codec == Codec::quantization; }

// Codecs are of float32, and updates of float64 have gradients of float64.
void require_float64_fits(const OffloadFlat& flat, const OffloadOptions& options) {
  const StateCodecs& codecs = options.codec;
  const auto is_float64 = [](DType dtype) { return dtype == DType::float64; };
  if (is_float64(flat.param) && !is_float64(flat.grad)) {
    throw ConfigError(
        format("[offload] parameters of '{}' are float64 and their gradients {}, must be float64",
               flat.name, name_of(flat.grad)));
  }
  const bool coded_state = codec::is_lossy(codecs.exp_avg) || codec::is_lossy(codecs.exp_avg_sq);
  const bool coded_params = codec::is_lossy(codecs.params);
  if ((is_float64(flat.param) && (coded_state || coded_params || codec::is_lossy(codecs.grads))) ||
      (is_float64(flat.compute) && coded_params)) {
    throw ConfigError(
        format("[offload] parameters of '{}' are {} and computed with as {}, but codec is {}: "
               "float64 can be kept as none or lossless only",
               flat.name, name_of(flat.param), name_of(flat.compute), name_of(codecs)));
  }
}

// How a tensor's state is kept: what 8 bits would spoil stays whole.
StatePlan state_plan(const OffloadFlat& flat, const OffloadFlat::Tensor& tensor,
                     const OffloadOptions& options, int64_t slice) {
  const StateCodecs& codecs = options.codec;
  const auto chosen = [&](Codec codec) {
    const bool kept = is_8_bit(codec) && (tensor.count < kSmall || tensor.embedding);
    return kept || codec == Codec::lossless ? Codec::none : codec;
  };
  StatePlan plan{
      .format = {.param = flat.param,
                 .grad = flat.grad,
                 .exp_avg = chosen(codecs.exp_avg),
                 .exp_avg_sq = chosen(codecs.exp_avg_sq),
                 .moments = num_moments(options.advanced.update_rule)},
      .lossless = codecs.exp_avg == Codec::lossless || codecs.exp_avg_sq == Codec::lossless};
  for (int64_t begin = 0; begin < tensor.count; begin += slice)
    plan.slices.push_back({begin, std::min(slice, tensor.count - begin)});
  return plan;
}

// Parameters that are trained may be encoded where they rest on the host.
Codec wanted_codec(const OffloadFlat& flat, const OffloadOptions& options) {
  const bool may = options.params && flat.trained && !flat.stays;
  return may ? options.codec.params : Codec::none;
}

// Of all tensors of a flat: a block for all codes and one for all remainders.
struct CodedBytes {
  int64_t codes = 0, remainders = 0;
};
CodedBytes coded_bytes(const OffloadFlat& flat, Codec wanted) {
  CodedBytes bytes;
  for (const OffloadFlat::Tensor& tensor : flat.tensors) {
    const Codec codec = weight_codec(wanted, tensor.count, tensor.embedding);
    const auto layout = codec::coded_layout(codec, tensor.count);
    bytes.codes += static_cast<int64_t>(layout.remainder);
    bytes.remainders += static_cast<int64_t>(layout.total - layout.remainder);
  }
  return bytes;
}

bool updates_in_backward(const OffloadOptions& options) {
  return options.advanced.clip_mode == ClipMode::none;
}

// Gathers and fetches have a line of their own; parameters that rest on the device of the only rank
// are used where they are.
bool has_line(const OffloadPlan::Flat& flat) {
  return flat.sizes.shared || flat.params == Tier::host;
}

bool is_away(const StatePlan& state) {
  return std::ranges::any_of(state.slices,
                             [](const StateSlice& slice) { return slice.tier != Tier::device; });
}

// Updates by the CPU have a copy of a parameter that rests on the device.
bool has_copy(const OffloadPlan& plan, const OffloadPlan::Flat& flat) {
  return plan.machine.site == UpdateSite::cpu && flat.params == Tier::device;
}

void count_slices(OffloadPlan::Flat& flat, const OffloadPlan& plan) {
  flat.bytes.states.clear();
  for (const StatePlan& state : flat.states) {
    for (const StateSlice& each : state.slices) {
      const int64_t bytes = packed_bytes(state, each);
      const size_t width = size_of(codec::moment_dtype(state.format));
      if (bytes == 0) {
        flat.bytes.states.emplace_back();
        continue;
      }
      flat.bytes.states.push_back({.on_device = rounded(bytes, plan.machine.device_grain),
                                   .on_host = state.lossless
                                                  ? packed_bound(bytes, width)
                                                  : rounded(bytes, plan.machine.host_grain)});
    }
  }
}

// An optimizer without state computes where the parameter rests.
void place_empty_states(OffloadPlan::Flat& flat) {
  for (StatePlan& state : flat.states) {
    for (StateSlice& slice : state.slices)
      if (packed_bytes(state, slice) == 0) slice.tier = flat.params;
  }
}

// What is encoded follows from where it rests. A coded parameter is its own master: its state has
// no remainder. Returns whether something changed.
bool choose_codecs(OffloadPlan::Flat& flat, const OffloadPlan& plan) {
  const Codec params =
      flat.params == Tier::host ? wanted_codec(flat.sizes, plan.options) : Codec::none;
  const Codec grads =
      flat.grads == Tier::host && flat.bytes.host_grads ? plan.options.codec.grads : Codec::none;
  if (flat.param_codec == params && flat.grad_codec == grads) return false;
  flat.param_codec = params;
  flat.grad_codec = grads;
  for (size_t i = 0; i < flat.states.size(); ++i) {
    const OffloadFlat::Tensor& tensor = flat.sizes.tensors[i];
    codec::PackedFormat& format = flat.states[i].format;
    format.weight = codec::is_lossy(params) ? weight_codec(params, tensor.count, tensor.embedding)
                                            : Codec::none;
    format.param = codec::is_lossy(params) ? DType::float32 : flat.sizes.param;
    format.grad = grads == Codec::bf16 ? DType::bfloat16 : flat.sizes.grad;
  }
  count_slices(flat, plan);
  return true;
}

OffloadPlan::Flat sizes_of(OffloadFlat flat, const OffloadPlan& plan) {
  const OffloadOptions& options = plan.options;
  const int64_t grain = plan.machine.device_grain;
  const int64_t slice = slice_elements(options, plan.machine.cuda);
  OffloadPlan::Flat all;
  if (flat.trained) {
    require_float64_fits(flat, options);
    for (const auto& tensor : flat.tensors)
      all.states.push_back(state_plan(flat, tensor, options, slice));
  }
  const Codec codec = wanted_codec(flat, options);
  all.gradient_line = rounded(bytes_of(flat.size, flat.reduce), grain);
  all.bytes = {.name = flat.name,
               .params = rounded(bytes_of(flat.shard, flat.param), grain),
               .line = rounded(bytes_of(flat.size, flat.compute), grain)};
  if (flat.trained && !updates_in_backward(options))
    all.bytes.grads = rounded(bytes_of(flat.shard, flat.grad), grain);
  if (codec::is_lossy(codec)) {
    const auto [codes, remainders] = coded_bytes(flat, codec);
    const int64_t host_grain = plan.machine.host_grain;
    all.bytes.host_params = rounded(codes, host_grain) + rounded(remainders, host_grain);
    // On CUDA codes cross the link, and are decoded there.
    if (plan.machine.cuda && !flat.shared) all.bytes.line += rounded(codes, grain);
  }
  const auto packed = [&](DType dtype) {
    return rounded(packed_values_bound(flat.shard, size_of(dtype)), plan.machine.host_grain);
  };
  if (codec == Codec::lossless) all.bytes.host_params = flat.shard > 0 ? packed(flat.param) : 0;
  if (all.bytes.grads > 0 && options.grads && options.codec.grads == Codec::lossless)
    all.bytes.host_grads = packed(flat.grad);
  if (all.bytes.grads > 0 && options.grads && options.codec.grads == Codec::bf16 &&
      flat.grad == DType::float32) {
    all.bytes.host_grads = rounded(bytes_of(flat.shard, DType::bfloat16), plan.machine.host_grain);
  }
  count_slices(all, plan);
  all.sizes = std::move(flat);
  return all;
}

// Gradients of shards on the device, of which the largest has so many bytes. Where updates follow
// in backward, every reduction in flight has its own until its update is over.
int64_t reduced_at_once(const OffloadPlan& plan, int64_t reduced) {
  if (reduced == 0) return 0;
  const int64_t count =
      updates_in_backward(plan.options) ? num_gradient_blocks(true, plan.machine.cuda) : 1;
  return count * rounded(reduced, plan.machine.device_grain);
}

// What the device must have at the least, whatever rests where: a line of the unit in use,
// gradients on their way, the ring, and what stays.
int64_t working_of(OffloadPlan& plan) {
  const OffloadOptions& options = plan.options;
  const bool local = std::ranges::none_of(
      plan.flats, [](const OffloadPlan::Flat& flat) { return flat.sizes.shared; });
  std::vector<std::pair<std::string, int64_t>> lines;  // of units
  int64_t working = 0, gradient = 0, reduced = 0, kept = 0;
  RingNeed need;
  for (const OffloadPlan::Flat& flat : plan.flats) {
    for (size_t i = 0; i < flat.states.size(); ++i) {
      RingNeed larger = ring_need(flat.states[i], options);
      if (const Codec codec = wanted_codec(flat.sizes, options); codec::is_lossy(codec)) {
        StatePlan coded = flat.states[i];
        const OffloadFlat::Tensor& tensor = flat.sizes.tensors[i];
        coded.format.param = DType::float32;
        coded.format.weight = weight_codec(codec, tensor.count, tensor.embedding);
        const RingNeed other = ring_need(coded, options);
        larger = {std::max(larger.largest, other.largest), std::max(larger.all, other.all)};
      }
      need += larger;
    }
    if (flat.sizes.stays) {
      working += flat.bytes.params + flat.gradient_line;
      for (const auto& slice : flat.bytes.states) working += slice.on_device;
      continue;
    }
    if (lines.empty() || lines.back().first != flat.sizes.unit)
      lines.emplace_back(flat.sizes.unit, 0);
    lines.back().second += flat.bytes.line;
    if (flat.sizes.trained) {
      gradient = std::max(gradient, flat.gradient_line);
      if (flat.sizes.shared)
        reduced = std::max(reduced, bytes_of(flat.sizes.shard, flat.sizes.reduce));
    }
    kept += (options.params ? 0 : flat.bytes.params) + (options.grads ? 0 : flat.bytes.grads);
  }
  if (options.params || !local) {
    int64_t largest = 0;
    for (const auto& [unit, bytes] : lines) largest = std::max(largest, bytes);
    working += largest;
  }
  if (options.grads || !local || updates_in_backward(options))
    working += num_gradient_blocks(updates_in_backward(options), plan.machine.cuda) * gradient;
  if (options.grads || updates_in_backward(options)) working += reduced_at_once(plan, reduced);
  const bool streams = plan.machine.cuda && plan.machine.site != UpdateSite::cpu;
  plan.ring = ring_bytes(need, options, streams, options.device_limit - working - kept);
  return working + rounded(plan.ring, plan.machine.device_grain);
}

}  // namespace

// Places of what may leave. Where parameters rest does not depend on what is on the host, so the
// copies of those that stay, and the state of those that are encoded, are known after a first look.
void place_flats(OffloadPlan& plan, int64_t host_reserve) {
  std::vector<std::vector<OffloadUnit::Slice>> first;  // what the decision was made with
  for (const OffloadPlan::Flat& flat : plan.flats) first.push_back(flat.bytes.states);
  for (const bool with_copies : {false, true}) {
    std::vector<OffloadUnit> units;
    bool again = false;
    for (size_t f = 0; f < plan.flats.size(); ++f) {
      const OffloadPlan::Flat& flat = plan.flats[f];
      if (flat.sizes.stays) continue;
      units.push_back(flat.bytes);
      for (size_t i = 0; i < first[f].size(); ++i)
        units.back().states[i].on_device = first[f][i].on_device;
      if (!has_copy(plan, flat)) continue;
      again = again || !flat.states.empty();
      size_t next = 0;
      for (const StatePlan& state : flat.states) {
        for (const StateSlice& slice : state.slices) {
          OffloadUnit::Slice& bytes = units.back().states[next++];
          if (with_copies && bytes.on_device > 0)
            bytes.on_host += bytes_of(slice.count, flat.sizes.param);
        }
      }
    }
    const OffloadPlaces places =
        place(units, plan.working + plan.activations, plan.options, host_reserve);
    size_t unit = 0;
    for (OffloadPlan::Flat& flat : plan.flats) {
      if (flat.sizes.stays) continue;
      const OffloadPlaces::Unit& tiers = places.units[unit++];
      flat.params = tiers.params;
      flat.grads = tiers.grads;
      size_t next = 0;
      for (StatePlan& state : flat.states) {
        for (StateSlice& slice : state.slices) slice.tier = tiers.states[next++];
      }
      again = choose_codecs(flat, plan) || again;
      place_empty_states(flat);
    }
    if (!again) return;
  }
}

namespace {

void count_states(OffloadPlan& plan, const OffloadPlan::Flat& flat) {
  size_t next = 0;
  for (const StatePlan& state : flat.states) {
    int64_t elements = 0;
    for (const StateSlice& slice : state.slices) {
      const OffloadUnit::Slice& bytes = flat.bytes.states[next++];
      elements += slice.count;
      if (slice.tier == Tier::device) plan.resting.states += bytes.on_device;
      if (slice.tier == Tier::host) plan.on_host.states += bytes.on_host;
      if (slice.tier == Tier::disk) plan.on_disk += bytes.on_host;
      if (plan.machine.site == UpdateSite::cpu && slice.tier != Tier::device &&
          flat.grads == Tier::device) {
        plan.host_used =
            std::max(plan.host_used,
                     kGradientStages * rounded(bytes_of(slice.count, updated_with(flat.sizes.grad)),
                                               plan.machine.host_grain));
      }
    }
    if (is_away(state) && has_copy(plan, flat))
      plan.on_host.states += rounded(bytes_of(elements, flat.sizes.param), plan.machine.host_grain);
  }
}

// Gathered parameters of the unit in use and of those that are fetched ahead, at most.
int64_t lines_at_once(const OffloadPlan& plan) {
  std::vector<int64_t> bytes;
  std::vector<size_t> parameters;
  const std::string* last = nullptr;
  for (const OffloadPlan::Flat& flat : plan.flats) {
    if (flat.sizes.stays) continue;
    if (last == nullptr || *last != flat.sizes.unit) {
      bytes.push_back(0);
      parameters.push_back(0);
    }
    last = &flat.sizes.unit;
    bytes.back() += has_line(flat) ? flat.bytes.line : 0;
    parameters.back() += static_cast<size_t>(flat.sizes.num_parameters);
  }
  int64_t largest = 0, most = 0;
  for (const int64_t line : bytes) largest = std::max(largest, line);
  for (int pass = 0; pass < 2; ++pass) {  // forward, backward
    for (size_t i = 0; i < bytes.size(); ++i) {
      const size_t ahead =
          units_ahead(std::span(parameters).subspan(i + 1), plan.options.advanced.prefetch);
      int64_t sum = 0;
      for (size_t k = i; k <= i + ahead; ++k) sum += bytes[k];
      most = std::max(most, sum);
    }
    std::ranges::reverse(bytes);
    std::ranges::reverse(parameters);
  }
  // What is fetched ahead takes only what is left.
  int64_t room =
      plan.options.device_limit - plan.resting.sum() - plan.used.grads - plan.used.states;
  if (plan.options.params) room = std::min(room, plan.options.param_budget - plan.resting.params);
  return std::max(largest, std::min(most, room));
}

void count(OffloadPlan& plan) {
  plan.resting = plan.used = plan.on_host = {};
  plan.on_disk = plan.host_used = plan.unreduced_on_device = plan.unreduced_on_host = 0;
  int64_t gradient = 0, reduced = 0;
  for (const OffloadPlan::Flat& flat : plan.flats) {
    if (flat.params == Tier::device) plan.resting.params += flat.bytes.params;
    if (flat.params != Tier::device) plan.on_host.params += flat.bytes.params_on_host();
    if (flat.grads == Tier::device) plan.resting.grads += flat.bytes.grads;
    if (flat.grads != Tier::device) plan.on_host.grads += flat.bytes.grads_on_host();
    if (flat.sizes.has_state) count_states(plan, flat);
    if (!flat.sizes.trained) continue;
    const bool on_host = flat.grads == Tier::host;
    if (on_host) {
      plan.unreduced_on_host +=
          flat.grad_codec == Codec::lossless
              ? rounded(packed_values_bound(flat.sizes.size, size_of(flat.sizes.reduce)),
                        plan.machine.host_grain)
              : flat.gradient_line;
    }
    if (!on_host && flat.sizes.shared) plan.unreduced_on_device += flat.gradient_line;
    if (on_host || flat.sizes.shared || updates_in_backward(plan.options))
      gradient = std::max(gradient, flat.gradient_line);
    if (flat.sizes.shared && (on_host || updates_in_backward(plan.options)))
      reduced = std::max(reduced, bytes_of(flat.sizes.shard, flat.sizes.reduce));
  }
  plan.used.grads =
      num_gradient_blocks(updates_in_backward(plan.options), plan.machine.cuda) * gradient +
      reduced_at_once(plan, reduced);
  const bool moves = plan.on_host.sum() + plan.on_disk > 0;
  if (moves && plan.ring > 0) plan.used.states = rounded(plan.ring, plan.machine.device_grain);
  plan.used.params = lines_at_once(plan);
  const double kept = threshold(plan.options.advanced.strategy);
  const int64_t most =
      std::min(plan.options.host_budget,
               static_cast<int64_t>(kept * static_cast<double>(plan.options.advanced.host_limit)));
  plan.state_room = std::max(plan.on_host.states, most - plan.on_host.params - plan.on_host.grads -
                                                      plan.host_used - plan.unreduced_on_host);
}

}  // namespace

namespace {

OffloadPlan sized_plan(const std::vector<OffloadFlat>& flats, const OffloadOptions& options,
                       const OffloadMachine& machine) {
  OffloadPlan plan{.options = options, .machine = machine};
  for (const OffloadFlat& flat : flats) plan.flats.push_back(sizes_of(flat, plan));
  plan.working = working_of(plan);
  return plan;
}

// What the device must hold, before anything has its place.
int64_t device_need(const OffloadPlan& plan) {
  int64_t bytes = plan.working;
  for (const OffloadPlan::Flat& flat : plan.flats) {
    if (flat.sizes.stays) continue;
    if (!plan.options.params) bytes += flat.bytes.params;
    if (!plan.options.grads) bytes += flat.bytes.grads;
    if (plan.options.optimizer) continue;
    for (const OffloadUnit::Slice& slice : flat.bytes.states) bytes += slice.on_device;
  }
  return bytes;
}

// Host memory for gradients on their way to the CPU that updates. What leaves the device does not
// depend on the host.
int64_t host_stages(OffloadPlan plan) {
  plan.options.host_budget = plan.options.advanced.host_limit = int64_t{1} << 60;
  place_flats(plan);
  count(plan);
  return plan.host_used;
}

}  // namespace

OffloadPlan plan_offload(std::vector<OffloadFlat> flats, const OffloadOptions& options,
                         const OffloadMachine& machine) {
  OffloadPlan plan = sized_plan(flats, options, machine);
  if (device_need(plan) > options.device_limit) {
    // Slices, and so the ring, grow with the limit: refused with the numbers of one that is enough.
    OffloadOptions enough = options;
    do {
      enough.device_limit = device_need(plan);
      plan = sized_plan(flats, enough, machine);
    } while (device_need(plan) > enough.device_limit);
    plan.options = options;
  }
  place_flats(plan, host_stages(plan));
  count(plan);
  return plan;
}

void recount(OffloadPlan& plan) { count(plan); }

void move_to_host(OffloadPlan& plan, const std::vector<bool>& flats) {
  for (size_t i = 0; i < flats.size(); ++i) {
    if (flats[i]) plan.flats[i].params = Tier::host;
    choose_codecs(plan.flats[i], plan);
    place_empty_states(plan.flats[i]);
  }
  count(plan);
}

int64_t packed_values_bound(int64_t elements, size_t width) {
  const auto bound = [&](int64_t count) {
    return count == 0 ? 0
                      : static_cast<int64_t>(sizeof(uint64_t)) +
                            packed_bound(count * static_cast<int64_t>(width), width);
  };
  return elements / kPackedElements * bound(kPackedElements) + bound(elements % kPackedElements);
}

Codec weight_codec(Codec wanted, int64_t count, bool embedding) {
  return is_8_bit(wanted) && (count < kSmall || embedding) ? Codec::bf16 : wanted;
}

}  // namespace lockstep::layout
