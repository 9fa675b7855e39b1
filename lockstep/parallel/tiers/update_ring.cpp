// SPDX-License-Identifier: Apache-2.0
#include "lockstep/parallel/tiers/update_ring.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>

namespace lockstep::parallel::detail {
namespace {

using layout::slot_layout;
using layout::SlotLayout;
using layout::Tier;
using layout::UpdateSite;
using optim::PackedSlice;

// With the gradient as it is now.
PackedFormat format_of(const OffloadedState& state, const UpdateInput& input) {
  PackedFormat format = state.plan().format;
  if (input.gradient.scalar_type() == at::kFloat) format.grad = DType::float32;
  return format;
}

}  // namespace

UpdateRing::UpdateRing(std::shared_ptr<OffloadTiers> tiers, UpdateSite site, size_t bytes)
    : tiers_(std::move(tiers)), site_(site), size_(bytes) {
  if (size_ == 0) return;
  memory_ =
      std::static_pointer_cast<std::byte>(tiers_->device_memory.take(size_, "state on its way"));
  // The memory may have been another's.
  tiers_->in->wait(memory::computed(tiers_->device));
}

void UpdateRing::compute(const OffloadedState& state, const PackedSlice& slice,
                         const UpdateInput& input) {
  const PackedFormat format = format_of(state, input);
  if (void* const stream = tiers_->work->stream()) {
    const c10::DeviceGuard guard(tiers_->device);
    optim::cuda::launch_packed_update(format, slice, input.factors, stream);
  } else {
    tiers_->work->run(
        [format, slice, factors = input.factors] { optim::packed_update(format, slice, factors); },
        state.name());
  }
}

codec::CodedArray UpdateRing::coded_at(const PackedFormat& format, std::byte* memory,
                                       int64_t elements) {
  const auto layout = codec::coded_layout(format.weight, elements);
  const bool scaled = codec::scales_size(format.weight, elements) > 0;
  return {.codec = format.weight,
          .codes = memory,
          .scales = scaled ? reinterpret_cast<float*>(memory + layout.scales) : nullptr,
          .remainder = reinterpret_cast<int8_t*>(memory + layout.remainder)};
}

void UpdateRing::copy_coded(memory::Queue& queue, Way way, const OffloadedState& state,
                            const StateSlice& place, std::byte* memory) {
  const PackedFormat& format = state.plan().format;
  const codec::CodedArray here = coded_at(format, memory, place.count);
  const codec::CodedArray there = state.weight_at(place.begin);
  const auto copy = [&](void* on_device, void* on_host, size_t bytes) {
    if (bytes == 0) return;
    if (way == Way::in) tiers_->to_device(queue, on_device, on_host, bytes, state.name());
    if (way == Way::home) tiers_->to_host(queue, on_host, on_device, bytes, state.name());
  };
  copy(here.codes, there.codes, codec::codes_size(format.weight, place.count));
  copy(here.scales, there.scales, codec::scales_size(format.weight, place.count));
  copy(here.remainder, there.remainder, static_cast<size_t>(place.count));
}

size_t UpdateRing::next_begin(size_t bytes) const {
  const size_t place = next_ % size_;
  return place + bytes <= size_ ? next_ : next_round();  // never in two parts
}

void UpdateRing::fetch(const Item& item) {
  OffloadTiers& tiers = *tiers_;
  const auto& [state, slice] = item;
  const StateSlice& place = slice->place;
  const PackedFormat& format = state->plan().format;
  const SlotLayout layout = slot_layout(format, place.count, tiers.options);
  Slot& slot = fetched_.emplace_back(
      Slot{.item = item, .begin = next_begin(layout.total), .memory = nullptr});
  slot.memory = memory_.get() + slot.begin % size_;
  next_ = slot.begin + layout.total;
  for (; !used_.empty() && used_.front().begin + size_ < next_; used_.pop_front())
    tiers.in->wait(used_.front().free);
  tiers.in->wait(slice->saved);
  if (place.tier != Tier::device && slice->bytes > 0) {
    if (slice->memory) {
      slot.source = slice->memory;
    } else {
      bring_home(*slice);
      slot.source = state->load(*slice);
    }
    tiers.copy_in(slot.memory, slot.source.get(), slice->bytes, state->name());
  }
  if (state->is_coded()) {
    copy_coded(*tiers.in, Way::in, *state, place, slot.memory + layout.param);
  } else if (state->params_on_host()) {
    tiers.copy_in(slot.memory + layout.param, at_element(state->values(), place.begin),
                  static_cast<size_t>(place.count) * size_of(format.param), state->name());
  }
  slot.arrived = tiers.in->record();
}

void UpdateRing::fetch_ahead() {
  for (; num_fetched_ < order_.size(); ++num_fetched_) {
    const Item& item = order_[num_fetched_];
    if (!item.slice->memory) return;  // on disk or compressed
    const size_t bytes =
        slot_layout(item.state->plan().format, item.slice->place.count, tiers_->options).total;
    if (!fetched_.empty() && next_begin(bytes) + bytes > fetched_.front().begin + size_) return;
    fetch(item);
  }
}

void UpdateRing::drop_fetched() {
  for (const Slot& slot : fetched_) used_.push_back({slot.begin, slot.arrived});
  fetched_.clear();
}

UpdateRing::Slot& UpdateRing::slot_for(const Item& item) {
  if (!fetched_.empty() && fetched_.front().item == item) return fetched_.front();
  drop_fetched();
  if (num_fetched_ < order_.size() && order_[num_fetched_] == item)
    ++num_fetched_;
  else
    order_.clear();  // it is another one now
  fetch(item);
  return fetched_.front();
}

void UpdateRing::end_step() {
  drop_fetched();
  order_ = std::exchange(now_, {});
  num_fetched_ = 0;
  if (order_.empty()) return;
  next_ = next_round();  // every step has the same slices at the same places
  if (tiers_->options.advanced.overlap)
    fetch_ahead();
  else
    order_.clear();
}

UpdateEvents UpdateRing::update_on_device(OffloadedState& state, OffloadedState::Slice& slice,
                                          const UpdateInput& input) {
  OffloadTiers& tiers = *tiers_;
  const int64_t begin = slice.place.begin, count = slice.place.count;
  const PackedFormat format = format_of(state, input);
  PackedSlice packed{.param = at_element(state.values(), begin),
                     .grad = at_element(input.gradient, begin),
                     .state = slice.memory.get(),
                     .elements = count};
  const bool moves_state = slice.place.tier != Tier::device && slice.bytes > 0;
  const bool moves = moves_state || state.params_on_host() || input.gradient_on_host;
  if (!moves) {
    tiers.work->wait(input.gradient_ready);
    compute(state, packed, input);
    const memory::Event done = tiers.work->record();
    return {done, done};
  }
  const SlotLayout layout = slot_layout(state.plan().format, count, tiers.options);
  const size_t param_bytes = static_cast<size_t>(count) * size_of(format.param);
  const Item item{&state, &slice};
  now_.push_back(item);
  Slot& slot = slot_for(item);
  if (moves_state) packed.state = slot.memory;
  void* const home = packed.param;
  if (state.is_coded()) packed.weight = coded_at(format, slot.memory + layout.param, count);
  if (state.params_on_host()) packed.param = slot.memory + layout.param;
  if (input.gradient_on_host) {
    void* const here = slot.memory + layout.grad;
    tiers.in->wait(input.gradient_ready);
    tiers.copy_in(here, packed.grad, static_cast<size_t>(count) * size_of(format.grad),
                  state.name());
    packed.grad = here;
    slot.arrived = tiers.in->record();
  }
  tiers.work->wait(slot.arrived);
  tiers.work->wait(input.gradient_ready);
  compute(state, packed, input);
  const memory::Event updated = tiers.work->record();
  memory::Event written = updated, done = updated;
  if (state.params_on_host()) {
    tiers.home->wait(updated);
    if (state.is_coded()) {
      copy_coded(*tiers.home, Way::home, state, slice.place, slot.memory + layout.param);
    } else {
      tiers.to_host(*tiers.home, home, packed.param, param_bytes, state.name());
    }
    written = done = slice.saved = tiers.home->record();
  }
  if (moves_state) {
    tiers.out->wait(written);
    tiers.copy_out(slot.source.get(), slot.memory, slice.bytes, state.name());
    done = slice.saved = tiers.out->record();
    if (!slice.memory) returns_.push_back({&state, &slice, slot.source, done});
  }
  used_.push_back({slot.begin, done});
  fetched_.pop_front();
  // Gradients from the host would wait behind what waits for this slice to leave.
  if (!input.gradient_on_host) fetch_ahead();
  return {updated, tiers.options.advanced.overlap ? written : done};
}

// What has arrived on the host moves to where it rests: all that has, what is more than a few,
// and `wanted`, which is read from there next.
void UpdateRing::bring_home(const OffloadedState::Slice& wanted) {
  constexpr size_t kUnderWay = layout::kFewSlices - 1;
  const auto is_wanted = [&](const Return& each) { return each.slice == &wanted; };
  while (!returns_.empty() && (returns_.size() > kUnderWay || returns_.front().arrived.passed() ||
                               std::any_of(returns_.begin(), returns_.end(), is_wanted))) {
    Return& first = returns_.front();
    first.arrived.wait();
    first.state->store(*first.slice, std::move(first.memory));
    returns_.erase(returns_.begin());
  }
}

void UpdateRing::finish() {
  for (Return& each : returns_) {
    each.arrived.wait();
    each.state->store(*each.slice, std::move(each.memory));
  }
  returns_.clear();
  drop_fetched();
  order_.clear();  // others may write before the next update is asked for
}

UpdateEvents UpdateRing::update_on_cpu(OffloadedState& state, const UpdateInput& input) {
  OffloadTiers& tiers = *tiers_;
  const PackedFormat format = format_of(state, input);
  auto& slices = state.slices();
  // State that is on the device is updated there, and needs no copy of the parameter here.
  const bool away = std::ranges::any_of(
      slices, [](const auto& slice) { return slice.place.tier != Tier::device; });
  const at::Tensor& values = away ? state.host_values() : state.values();
  // The gradient of the next slice is on its way while this one is computed.
  const auto fetch_gradient = [&](size_t i) -> memory::Event {
    if (i >= slices.size() || slices[i].place.tier == Tier::device || input.gradient_on_host)
      return input.gradient_ready;
    at::Tensor& stage = gradient_stages_[i % 2];
    const StateSlice& place = slices[i].place;
    const size_t bytes = static_cast<size_t>(place.count) * size_of(format.grad);
    if (!stage.defined() || stage.nbytes() < bytes)
      stage = tiers.on_host(static_cast<int64_t>(bytes), at::kByte, "gradients on their way");
    tiers.out->wait(input.gradient_ready);
    tiers.copy_out(stage.data_ptr(), at_element(input.gradient, place.begin), bytes, state.name());
    return tiers.out->record();
  };
  memory::Event done, arriving = fetch_gradient(0);
  UpdateEvents there;
  for (size_t i = 0; i < slices.size(); ++i) {
    OffloadedState::Slice& slice = slices[i];
    if (slice.place.tier == Tier::device) {
      there = update_on_device(state, slice, input);
      arriving = fetch_gradient(i + 1);
      continue;
    }
    const memory::Event arrived = std::exchange(arriving, fetch_gradient(i + 1));
    if (i + 1 < slices.size()) state.prefetch(slices[i + 1]);
    arrived.wait();
    const int64_t begin = slice.place.begin, count = slice.place.count;
    const auto memory = state.load(slice);
    optim::packed_update(format,
                         {.param = at_element(values, begin),
                          .grad = input.gradient_on_host
                                      ? at_element(input.gradient, begin)
                                      : static_cast<std::byte*>(gradient_stages_[i % 2].data_ptr()),
                          .state = memory.get(),
                          .elements = count,
                          .weight = state.weight_at(begin)},
                         input.factors);
    state.store(slice, memory);
    if (!state.params_on_host()) {
      tiers.copy_in(at_element(state.values(), begin), at_element(values, begin),
                    static_cast<size_t>(count) * size_of(format.param), state.name());
      done = tiers.in->record();
    }
  }
  there.written.wait();
  return {{}, done};  // the gradient was read
}

UpdateEvents UpdateRing::update(OffloadedState& state, const UpdateInput& input) {
  try {
    return update_all(state, input);
  } catch (...) {
    tiers_->wait_for_updates();  // the caller lets the gradient go
    throw;
  }
}

UpdateEvents UpdateRing::update_all(OffloadedState& state, const UpdateInput& input) {
  if (site_ == UpdateSite::cpu) return update_on_cpu(state, input);
  UpdateEvents done;
  auto& slices = state.slices();
  for (size_t i = 0; i < slices.size(); ++i) {
    if (i + 1 < slices.size()) state.prefetch(slices[i + 1]);
    done = update_on_device(state, slices[i], input);
  }
  return done;
}

}  // namespace lockstep::parallel::detail
