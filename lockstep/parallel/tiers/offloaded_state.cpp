// SPDX-License-Identifier: Apache-2.0
#include "lockstep/parallel/tiers/offloaded_state.h"

#include <ATen/ATen.h>

#include <utility>

#include "lockstep/codec/codec.h"
#include "lockstep/core/error.h"

namespace lockstep::parallel::detail {
namespace {

using layout::Tier;
using optim::PackedSlice;

// State without codecs.
optim::PackedFormat plain_format(const optim::PackedFormat& format) {
  return {.param = format.param, .moments = format.moments};
}

std::shared_ptr<std::byte> plain_memory(size_t bytes) {
  return {new std::byte[bytes](), std::default_delete<std::byte[]>()};
}

}  // namespace

OffloadedState::OffloadedState(std::string name, StatePlan plan, at::Tensor values,
                               layout::Tier params, std::shared_ptr<OffloadTiers> tiers,
                               codec::CodedArray weight)
    : name_(std::move(name)),
      plan_(std::move(plan)),
      values_(std::move(values)),
      weight_(weight),
      params_(params),
      tiers_(std::move(tiers)) {
  const std::string what = "optimizer state of " + name_;
  for (const StateSlice& place : plan_.slices) {
    Slice slice{.place = place, .bytes = optim::packed_layout(plan_.format, place.count).total};
    if (slice.bytes == 0) {
      slice.memory = plain_memory(1);  // never used
    } else if (place.tier == Tier::device) {
      slice.memory =
          std::static_pointer_cast<std::byte>(tiers_->device_memory.take(slice.bytes, what));
      const at::Tensor zeros =
          at::from_blob(slice.memory.get(), {static_cast<int64_t>(slice.bytes)},
                        at::TensorOptions().dtype(at::kByte).device(tiers_->device));
      zeros.zero_();
    } else if (place.tier == Tier::host && !plan_.lossless) {
      slice.memory = tiers_->host_memory.take(slice.bytes, what);
    }
    slices_.push_back(std::move(slice));
    Slice& made = slices_.back();
    if (place.tier == Tier::device) continue;
    tiers_->kept.plain +=
        static_cast<int64_t>(optim::packed_layout(plain_format(plan_.format), place.count).total);
    if (!made.memory) store(made, plain_memory(made.bytes));
    if (made.memory) tiers_->kept.bytes += static_cast<int64_t>(made.bytes);
  }
}

OffloadedState::~OffloadedState() {
  for (const Slice& slice : slices_) {
    if (slice.place.tier == Tier::device) continue;
    tiers_->kept.plain -= static_cast<int64_t>(
        optim::packed_layout(plain_format(plan_.format), slice.place.count).total);
    tiers_->kept.bytes -= static_cast<int64_t>(kept_bytes(slice));
  }
}

size_t OffloadedState::kept_bytes(const Slice& slice) const {
  if (slice.memory) return slice.bytes;
  return slice.place.tier == Tier::disk ? slice.block_bytes : slice.packed.size();
}

const at::Tensor& OffloadedState::host_values() {
  if (params_on_host()) return values_;
  if (!mirror_.defined()) {
    mirror_ = tiers_->on_host(values_.numel(), values_.scalar_type(), "a copy of " + name_);
    tiers_->out->wait(memory::computed(tiers_->device));
    tiers_->copy_out(mirror_.data_ptr(), values_.data_ptr(), values_.nbytes(), name_);
    tiers_->out->record().wait();
  }
  return mirror_;
}

void OffloadedState::hold_values() {
  mirror_.reset();
  // A whole master tells by itself what others wrote.
  if (optim::master_of(plan_.format) != optim::Master::remainder || held_.defined()) return;
  held_ = at::empty({values_.numel()}, at::kFloat);
  unpack(nullptr, nullptr, held_.data_ptr<float>());
}

void OffloadedState::adopt_values() {
  if (!held_.defined()) return;
  const at::Tensor master = std::exchange(held_, {});
  const at::Tensor exp_avg = at::empty_like(master), exp_avg_sq = at::empty_like(master);
  unpack(exp_avg.data_ptr<float>(), exp_avg_sq.data_ptr<float>(), nullptr);
  const at::Tensor now = values_.to(at::kCPU);
  const at::Tensor kept =
      at::where(master.to(now.scalar_type()).eq(now), master, now.to(at::kFloat));
  pack(exp_avg.data_ptr<float>(), exp_avg_sq.data_ptr<float>(), kept.data_ptr<float>());
}

std::shared_ptr<std::byte> OffloadedState::load(Slice& slice) {
  slice.saved.wait();
  if (slice.memory) return slice.memory;
  if (slice.place.tier == Tier::disk) {
    const auto bytes = tiers_->disk->get(slice.block);
    tiers_->traffic.from_disk += static_cast<int64_t>(slice.block_bytes);
    if (!plan_.lossless) return std::const_pointer_cast<std::byte>(bytes);  // the caller's own
    auto memory = plain_memory(slice.bytes);
    codec::decompress({bytes.get(), slice.block_bytes}, {memory.get(), slice.bytes});
    return memory;
  }
  auto memory = plain_memory(slice.bytes);
  codec::decompress(slice.packed, {memory.get(), slice.bytes});
  return memory;
}

void OffloadedState::prefetch(const Slice& slice) {
  if (slice.place.tier == Tier::disk) tiers_->disk->prefetch(slice.block);
}

void OffloadedState::store(Slice& slice, std::shared_ptr<std::byte> memory) {
  if (slice.memory) return;  // it is there
  const size_t before = kept_bytes(slice);
  store_packed(slice, std::move(memory));
  tiers_->kept.bytes += static_cast<int64_t>(kept_bytes(slice)) - static_cast<int64_t>(before);
}

// What LZ4 makes of a slice is known when it comes back from its first update: then it is on the
// host if there is room, also where it was planned for the disk. Later it may outgrow its place.
void OffloadedState::store_packed(Slice& slice, std::shared_ptr<std::byte> memory) {
  Tier& tier = slice.place.tier;
  if (!plan_.lossless) {
    slice.block_bytes = slice.bytes;
    slice.block = tiers_->disk->put({memory.get(), slice.bytes}, memory);
    tiers_->traffic.to_disk += static_cast<int64_t>(slice.block_bytes);
    return;
  }
  // LZ4 finds more in bytes of the same meaning.
  auto packed =
      codec::compress({memory.get(), slice.bytes}, size_of(codec::moment_dtype(plan_.format)));
  const bool first = slice.stores++ == 1;
  const auto moved = static_cast<int64_t>(slice.bytes);
  if ((tier == Tier::host || first) && take_host(slice, packed.size())) {
    if (tier == Tier::disk) tiers_->kept.moved_to_host += moved;
    tier = Tier::host;
    slice.block = {};
    slice.block_bytes = 0;
    slice.packed = std::move(packed);
    return;
  }
  if (!tiers_->disk) {  // parameters and gradients have grown, and it cannot be anywhere else
    slice.share = tiers_->host_budget.take_over(packed.size());
    slice.packed = std::move(packed);
    return;
  }
  if (tier == Tier::host) tiers_->kept.moved_to_host -= moved;
  tier = Tier::disk;
  slice.packed = {};
  auto kept = std::make_shared<std::vector<std::byte>>(std::move(packed));
  slice.block_bytes = kept->size();
  slice.block = tiers_->disk->put(*kept, kept);
  tiers_->traffic.to_disk += static_cast<int64_t>(slice.block_bytes);
}

bool OffloadedState::take_host(Slice& slice, size_t bytes) {
  const std::string what = "optimizer state of " + name_;
  slice.share = {};
  slice.room = {};
  try {
    slice.room = tiers_->state_room.take(bytes, what);
    slice.share = tiers_->host_budget.take(bytes, what);
    return true;
  } catch (const OverBudget&) {
    slice.share = {};
    slice.room = {};
    return false;
  }
}

// Calls visit(slice, state) with the state of every slice in host memory, and keeps what it writes.
template <class Visit>
void OffloadedState::for_each_on_host(const Visit& visit) {
  for (Slice& slice : slices_) {
    if (slice.place.tier != Tier::device) {
      auto memory = load(slice);
      visit(slice, memory.get());
      store(slice, memory);
      continue;
    }
    if (slice.bytes == 0) {
      visit(slice, slice.memory.get());
      continue;
    }
    const at::Tensor state =
        at::from_blob(slice.memory.get(), {static_cast<int64_t>(slice.bytes)},
                      at::TensorOptions().dtype(at::kByte).device(tiers_->device));
    const at::Tensor host = state.to(at::kCPU, /*non_blocking=*/false, /*copy=*/true);
    visit(slice, static_cast<std::byte*>(host.data_ptr()));
    state.copy_(host);
  }
}

void OffloadedState::unpack(void* exp_avg, void* exp_avg_sq, void* master) {
  const at::Tensor values = values_.to(at::kCPU);
  const size_t width = size_of(codec::moment_dtype(plan_.format));
  const auto from = [&](void* array, int64_t begin) -> void* {
    return array ? static_cast<std::byte*>(array) + static_cast<size_t>(begin) * width : nullptr;
  };
  for_each_on_host([&](Slice& slice, std::byte* state) {
    const int64_t begin = slice.place.begin;
    optim::unpack(plan_.format,
                  {.param = at_element(values, begin),
                   .grad = nullptr,
                   .state = state,
                   .elements = slice.place.count,
                   .weight = weight_at(begin)},
                  {.exp_avg = from(exp_avg, begin),
                   .exp_avg_sq = from(exp_avg_sq, begin),
                   .master = from(master, begin)});
  });
}

void OffloadedState::pack(const void* exp_avg, const void* exp_avg_sq, const void* master) {
  mirror_.reset();
  held_.reset();
  const at::Tensor values = values_.to(at::kCPU);
  const bool has_master = optim::master_of(plan_.format) != optim::Master::none;
  const auto width = static_cast<int64_t>(size_of(codec::moment_dtype(plan_.format)));
  at::Tensor kept[3];
  for_each_on_host([&](Slice& slice, std::byte* state) {
    const int64_t begin = slice.place.begin;
    const auto from = [&](const void* array, at::Tensor& own) -> void* {
      if (array != nullptr)
        return static_cast<std::byte*>(const_cast<void*>(array)) + begin * width;
      own = at::empty({slice.place.count * width}, at::kByte);
      return own.data_ptr();
    };
    const PackedSlice packed{.param = at_element(values, begin),
                             .grad = nullptr,
                             .state = state,
                             .elements = slice.place.count,
                             .weight = weight_at(begin)};
    const optim::UnpackedState all{.exp_avg = from(exp_avg, kept[0]),
                                   .exp_avg_sq = from(exp_avg_sq, kept[1]),
                                   .master = has_master || (is_coded() && master != nullptr)
                                                 ? from(master, kept[2])
                                                 : nullptr};
    optim::unpack(plan_.format, packed,
                  {.exp_avg = exp_avg == nullptr ? all.exp_avg : nullptr,
                   .exp_avg_sq = exp_avg_sq == nullptr ? all.exp_avg_sq : nullptr,
                   .master = master == nullptr ? all.master : nullptr});
    optim::pack(plan_.format, packed, all);
  });
  if (values_.is_cuda()) values_.copy_(values);
}

}  // namespace lockstep::parallel::detail
