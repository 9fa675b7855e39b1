#include "lockstep/parallel/offload/update_ring.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>

#include "lockstep/codec/codec.h"

namespace lockstep::parallel::detail {
namespace {

using layout::Tier;
using layout::UpdateSite;
using optim::detail::PackedFormat;
using optim::detail::PackedSlice;

constexpr size_t kAlignment = 256;
// One that comes, one that is computed with, one that goes.
constexpr size_t kFewSlots = 3;

size_t aligned(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// A slot has the state of a slice, and its parameter and its gradient where these may rest on the
// host.
struct SlotLayout {
  size_t param, grad, total;
};
SlotLayout slot_layout(const PackedFormat& format, int64_t elements,
                       const layout::OffloadOptions& options) {
  const auto bytes = [&](bool moves, DType dtype) {
    return moves ? aligned(static_cast<size_t>(elements) * size_of(dtype)) : 0;
  };
  const size_t state = aligned(optim::detail::packed_layout(format, elements).total);
  const size_t grad = state + bytes(options.params, format.param);
  return {state, grad, grad + bytes(options.grads, format.grad)};
}

std::byte* at_element(const at::Tensor& tensor, int64_t index) {
  return static_cast<std::byte*>(tensor.data_ptr()) +
         static_cast<size_t>(index) * tensor.element_size();
}

}  // namespace

size_t UpdateRing::num_slots(const layout::OffloadOptions& options, c10::Device device,
                             size_t slot_bytes, int64_t room) {
  if (!device.is_cuda()) return kFewSlots;
  // What is fetched before gradients are known makes updates quick, but costs memory that could
  // hold state for good: the more of it leaves, the more slots are worth, up to two fifths of the
  // limit.
  const double share = 0.4 * layout::aggressiveness(options.strategy);
  const auto most = static_cast<int64_t>(share * static_cast<double>(options.device_limit));
  const auto bytes = static_cast<size_t>(std::max<int64_t>(std::min(most, room), 0));
  return std::max(bytes / std::max<size_t>(slot_bytes, 1), kFewSlots);
}

int64_t UpdateRing::slice_elements(const layout::OffloadOptions& options, c10::Device device) {
  // A few slots together have at most an eighth of the device's limit.
  constexpr int64_t kBytes = 16;  // of an element at most: state, parameter and gradient
  const int64_t most = device.is_cuda() ? int64_t{16} << 20 : int64_t{1} << 20;
  const auto slots = static_cast<int64_t>(kFewSlots);
  const int64_t fits = options.device_limit / 8 / slots / kBytes / codec::kBlock * codec::kBlock;
  return std::clamp(fits, codec::kBlock, most);
}

size_t UpdateRing::slot_bytes(const StatePlan& plan, const layout::OffloadOptions& options) {
  size_t most = 0;
  for (const StateSlice& slice : plan.slices)
    most = std::max(most, slot_layout(plan.format, slice.count, options).total);
  return most;
}

UpdateRing::UpdateRing(std::shared_ptr<OffloadTiers> tiers, UpdateSite site, RingSize size)
    : tiers_(std::move(tiers)), site_(site), size_(size) {
  for (size_t i = 0; i < size_.slots; ++i) {
    slots_.push_back({std::static_pointer_cast<std::byte>(
        tiers_->device_memory.take(size_.slot_bytes, "state on its way"))});
  }
  // The memory may have been another's.
  tiers_->in->wait(memory::computed(tiers_->device));
}

UpdateRing::Slot& UpdateRing::next_slot() {
  Slot& slot = slots_[next_];
  next_ = (next_ + 1) % slots_.size();
  return slot;
}

void UpdateRing::compute(const OffloadedState& state, const PackedSlice& slice,
                         const optim::detail::AdamWFactors& factors) {
  const PackedFormat& format = state.plan().format;
  if (void* const stream = tiers_->work->stream()) {
    const c10::DeviceGuard guard(tiers_->device);
    optim::detail::cuda::launch_packed_adamw(format, slice, factors, stream);
  } else {
    tiers_->work->run([=] { optim::detail::packed_adamw(format, slice, factors); }, state.name());
  }
}

void UpdateRing::fetch(Slot& slot, const Item& item) {
  OffloadTiers& tiers = *tiers_;
  const auto& [state, slice] = item;
  const StateSlice& place = slice->place;
  tiers.in->wait(slot.free);
  tiers.in->wait(slice->saved);
  if (place.tier != Tier::device) {
    if (slice->memory) {
      slot.source = slice->memory;
    } else {
      bring_home();
      slot.source = state->load(*slice);
    }
    tiers.copy_in(slot.memory.get(), slot.source.get(), slice->bytes, state->name());
  }
  if (!state->params_on_host()) return;
  const PackedFormat& format = state->plan().format;
  tiers.copy_in(slot.memory.get() + slot_layout(format, place.count, tiers.options).param,
                at_element(state->values(), place.begin),
                static_cast<size_t>(place.count) * size_of(format.param), state->name());
}

bool UpdateRing::is_fetched(const Item& item) {
  if (num_used_ == fetched_.size()) return false;
  if (fetched_[num_used_] == item) {
    ++num_used_;
    return true;
  }
  // Another order than before: what was fetched is of no use.
  num_used_ = fetched_.size();
  return false;
}

void UpdateRing::end_step() {
  fetched_.clear();
  num_used_ = 0;
  for (const Item& item : now_) {
    const bool at_hand = item.slice->memory != nullptr;  // neither on disk nor compressed
    if (fetched_.size() == slots_.size() || !at_hand) break;
    Slot& slot = slots_[(next_ + fetched_.size()) % slots_.size()];
    fetch(slot, item);
    slot.free = tiers_->in->record();
    fetched_.push_back(item);
  }
  now_.clear();
}

UpdateEvents UpdateRing::update_on_device(OffloadedState& state, OffloadedState::Slice& slice,
                                          const UpdateInput& input) {
  OffloadTiers& tiers = *tiers_;
  const int64_t begin = slice.place.begin, count = slice.place.count;
  const PackedFormat& format = state.plan().format;
  PackedSlice packed{.param = at_element(state.values(), begin),
                     .grad = at_element(input.gradient, begin),
                     .state = slice.memory.get(),
                     .elements = count};
  const bool moves_state = slice.place.tier != Tier::device;
  const bool moves = moves_state || state.params_on_host() || input.gradient_on_host;
  if (!moves) {
    tiers.work->wait(input.gradient_ready);
    compute(state, packed, input.factors);
    const memory::Event done = tiers.work->record();
    return {done, done};
  }
  Slot& slot = next_slot();
  const SlotLayout layout = slot_layout(format, count, tiers.options);
  const size_t param_bytes = static_cast<size_t>(count) * size_of(format.param);
  const Item item{&state, &slice};
  now_.push_back(item);
  if (!is_fetched(item)) fetch(slot, item);
  if (moves_state) packed.state = slot.memory.get();
  void* const home = packed.param;
  if (state.params_on_host()) packed.param = slot.memory.get() + layout.param;
  if (input.gradient_on_host) {
    void* const here = slot.memory.get() + layout.grad;
    tiers.in->wait(input.gradient_ready);
    tiers.copy_in(here, packed.grad, static_cast<size_t>(count) * size_of(format.grad),
                  state.name());
    packed.grad = here;
  }
  tiers.work->wait(tiers.in->record());
  tiers.work->wait(input.gradient_ready);
  compute(state, packed, input.factors);
  const memory::Event updated = tiers.work->record();
  memory::Event written = updated, done = updated;
  if (state.params_on_host()) {
    tiers.home->wait(updated);
    tiers.to_host(*tiers.home, home, packed.param, param_bytes, state.name());
    written = done = slice.saved = tiers.home->record();
  }
  if (moves_state) {
    tiers.out->wait(written);
    tiers.copy_out(slot.source.get(), slot.memory.get(), slice.bytes, state.name());
    done = slice.saved = tiers.out->record();
    if (!slice.memory) returns_.push_back({&state, &slice, slot.source, done});
  }
  slot.free = done;
  return {updated, tiers.options.overlap ? written : done};
}

// What has arrived on the host goes on to the disk. Few at a time are under way.
void UpdateRing::bring_home() {
  const size_t under_way = slots_.size() - 1;
  while (returns_.size() > under_way || (!returns_.empty() && returns_.front().arrived.passed())) {
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
  num_used_ = fetched_.size();
}

UpdateEvents UpdateRing::update_on_cpu(OffloadedState& state, const UpdateInput& input) {
  OffloadTiers& tiers = *tiers_;
  const PackedFormat& format = state.plan().format;
  const at::Tensor& values = state.host_values();
  auto& slices = state.slices();
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
    optim::detail::packed_adamw(
        format,
        {.param = at_element(values, begin),
         .grad = input.gradient_on_host
                     ? at_element(input.gradient, begin)
                     : static_cast<std::byte*>(gradient_stages_[i % 2].data_ptr()),
         .state = memory.get(),
         .elements = count},
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
