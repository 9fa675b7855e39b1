// SPDX-License-Identifier: Apache-2.0
#include "lockstep/parallel/flat/gathered_residence.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cstring>

#include "lockstep/comm/collectives.h"
#include "lockstep/core/trace.h"
#include "lockstep/layout/offload_plan.h"

namespace lockstep::parallel::detail {
namespace {

// Lines outlive the mode that is on when they are first needed: none is an inference tensor.
struct OwnMode {
  c10::InferenceMode normal{false};
  at::NoGradGuard no_grad = {};
};

}  // namespace

GatheredResidence::GatheredResidence(FlatParameter& parameter, FlatShard& shard,
                                     FlatEnvironment& environment)
    : Residence(ParameterState::sharded),
      plan_(parameter.plan()),
      parameter_(parameter),
      shard_(shard),
      environment_(environment) {
  if (plan_.shard.size() > 1 && plan_.rest_device.is_cpu())
    peers_ = comm::PeerMemory::open(shard.sent(), plan_.shard);
  if (plan_.shard.size() > 1 && plan_.is_encoded()) plan_encoded_slices();
  if (!peers_) return;
  environment.one_sided = true;
  if (!plan_.is_encoded()) plan_slices();
}

at::Tensor GatheredResidence::line_memory(at::ScalarType dtype, c10::Device device) {
  const int64_t size = parameter_.layout().size;
  const std::shared_ptr<void> memory =
      environment_.gather_memory.take(static_cast<size_t>(size) * c10::elementSize(dtype), device);
  return at::from_blob(
      memory.get(), {size}, [memory](void*) {}, at::TensorOptions().dtype(dtype).device(device));
}

void GatheredResidence::plan_slices() {
  constexpr int64_t kBytes = int64_t{1} << 20;
  const auto most = kBytes / static_cast<int64_t>(shard_.sent().element_size());
  for (int step = 0; step < plan_.shard.size(); ++step) {
    const int rank = (plan_.shard.rank() + step) % plan_.shard.size();  // each begins elsewhere
    if (step == 0 && plan_.resident) continue;                          // in place
    const layout::Range range = parameter_.layout().blocks[static_cast<size_t>(rank)];
    for (int64_t begin = range.begin; begin < range.end; begin += most)
      slices_.push_back({rank, begin - range.begin, begin, std::min(most, range.end - begin)});
  }
}

void GatheredResidence::plan_encoded_slices() {
  constexpr int64_t kMost = int64_t{1} << 19;  // elements
  static_assert(kMost % codec::kBlock == 0);
  for (int rank = 0; rank < plan_.shard.size(); ++rank)
    blocks_.push_back(encoded_block(parameter_, rank));
  for (int step = 0; step < plan_.shard.size(); ++step) {
    const int rank = (plan_.shard.rank() + step) % plan_.shard.size();  // each begins elsewhere
    const auto part = static_cast<size_t>(rank);
    const int64_t block = parameter_.layout().blocks[part].begin;
    if (is_packed()) {
      const int64_t size = parameter_.layout().blocks[part].size();
      for (int64_t begin = 0; begin < size; begin += layout::kPackedElements) {
        slices_.push_back({rank, begin, block + begin,
                           std::min(layout::kPackedElements, size - begin),
                           static_cast<size_t>(begin / layout::kPackedElements)});
      }
      continue;
    }
    for (size_t tensor = 0; tensor < blocks_[part].tensors.size(); ++tensor) {
      const layout::Range range = blocks_[part].tensors[tensor].range;
      for (int64_t begin = 0; begin < range.size(); begin += kMost) {
        slices_.push_back({rank, begin, block + range.begin + begin,
                           std::min(kMost, range.size() - begin), tensor});
      }
    }
  }
}

void GatheredResidence::decode_slice(const at::Tensor& line, const PeerSlice& slice,
                                     const std::byte* sent) const {
  const auto part = static_cast<size_t>(slice.rank);
  std::byte* const to = static_cast<std::byte*>(line.data_ptr()) +
                        static_cast<size_t>(slice.target) * line.element_size();
  if (is_packed()) {
    const PackedView packed{sent, parameter_.layout().blocks[part].size(), plan_.dtype};
    return packed.read(static_cast<int64_t>(slice.tensor), line.scalar_type(), to);
  }
  EncodedShard::decode(blocks_[part].tensors[slice.tensor], sent, slice.source, slice.count,
                       line.scalar_type(), to);
}

void GatheredResidence::copy_slice(const at::Tensor& line, const PeerSlice& slice) const {
  if (!blocks_.empty()) return decode_slice(line, slice, peers_->of(slice.rank));
  const auto size = static_cast<int64_t>(line.element_size());
  std::memcpy(static_cast<std::byte*>(line.data_ptr()) + slice.target * size,
              peers_->of(slice.rank) + slice.source * size,
              static_cast<size_t>(slice.count * size));
}

void GatheredResidence::copy_slice_by_all(const at::Tensor& line, const PeerSlice& slice) const {
  if (!blocks_.empty()) return decode_slice(line, slice, peers_->of(slice.rank));
  const auto size = static_cast<int64_t>(line.element_size());
  // Only ever read; torch has no tensors of constant memory.
  auto* const source = const_cast<std::byte*>(peers_->of(slice.rank)) + slice.source * size;
  line.narrow(0, slice.target, slice.count)
      .copy_(at::from_blob(source, {slice.count}, line.options()));
}

void GatheredResidence::pull(const at::Tensor& line) {
  const trace::Span span("shard", "gather " + plan_.name);
  const auto copy = [&](size_t slice) { copy_slice_by_all(line, slices_[slice]); };
  if (pulling_.valid()) return pulling_.finish(copy);
  for (size_t slice = 0; slice < slices_.size(); ++slice) copy(slice);
}

// Where a line arrives is where it is used, unless the model has another type or device.
void GatheredResidence::begin(bool beside_computation) {
  const bool has_line = plan_.resident && line_.defined();
  if (!communicates()) {  // a local copy, made when it is needed
    if (!has_line) line_ = line_memory(plan_.compute_dtype, plan_.device);
    return;
  }
  const bool same = plan_.gather_dtype == plan_.compute_dtype && plan_.rest_device == plan_.device;
  arriving_ = shard_.whole_line().defined() ? shard_.whole_line()
                                            : line_memory(plan_.gather_dtype, plan_.rest_device);
  if (!has_line) line_ = same ? arriving_ : line_memory(plan_.compute_dtype, plan_.device);
  if (!peers_ && is_packed()) {
    // Sizes that follow from values are not known to others: the values themselves travel.
    plain_ = at::empty({parameter_.block().size()}, plan_.gather_dtype);
    shard_.encoded()->decode_all(plan_.gather_dtype, static_cast<std::byte*>(plain_.data_ptr()));
    gathering_ = comm::all_gather(arriving_, plain_, plan_.shard,
                                  {.counts = parameter_.layout().counts(), .tag = plan_.name});
  } else if (!peers_ && !blocks_.empty()) {
    std::vector<int64_t> counts;
    int64_t sum = 0;
    for (const EncodedBlock& block : blocks_) {
      counts.push_back(static_cast<int64_t>(block.code_bytes));
      sum += counts.back();
    }
    codes_ = at::empty({sum}, at::kByte);
    gathering_ =
        comm::all_gather(codes_, shard_.sent(), plan_.shard, {.counts = counts, .tag = plan_.name});
  } else if (!peers_) {
    gathering_ = comm::all_gather(arriving_, shard_.sent(), plan_.shard,
                                  {.counts = parameter_.layout().counts(), .tag = plan_.name});
  } else if (beside_computation) {
    pulling_ = environment_.copy_thread.start(
        slices_.size(),
        [this, line = arriving_](size_t slice) { copy_slice(line, slices_[slice]); });
  } else {
    pull(arriving_);
  }
}

void GatheredResidence::wait() {
  if (pulling_.valid()) pull(arriving_);
  std::exchange(gathering_, {}).wait();
  plain_.reset();
  if (!codes_.defined()) return;
  std::vector<const std::byte*> sent{static_cast<const std::byte*>(codes_.data_ptr())};
  for (const EncodedBlock& block : blocks_) sent.push_back(sent.back() + block.code_bytes);
  for (const PeerSlice& slice : slices_)
    decode_slice(arriving_, slice, sent[static_cast<size_t>(slice.rank)]);
  codes_.reset();
}

void GatheredResidence::finish() {
  if (copy_is_valid_) {
    line_.copy_(copy_);
  } else if (plan_.shard.size() == 1) {
    shard_.wait_updated();
    line_.copy_(shard_.values());
  } else if (!arriving_.is_same(line_)) {
    line_.copy_(arriving_);
  }
  arriving_.reset();
}

// What could not be gathered is not here.
void GatheredResidence::wait_or_drop() {
  try {
    wait();
  } catch (...) {
    drop_line();
    throw;
  }
}

void GatheredResidence::drop_line() {
  parameter_.hide();
  line_.reset();
  arriving_.reset();
  state_ = ParameterState::sharded;
}

bool GatheredResidence::acquire(When when) {
  if (state_ == ParameterState::gathered) return false;
  const bool ahead = state_ == ParameterState::gathering;
  if (when == When::ahead && (ahead || !has_room())) return false;
  if (!ahead) {
    if (!has_room()) environment_.evict();
    const OwnMode mode;
    begin(when == When::ahead);
    state_ = ParameterState::gathering;
  }
  if (when == When::ahead) return false;
  const at::NoGradGuard no_grad;
  const bool counts = communicates();
  wait_or_drop();
  finish();
  parameter_.show(line_);
  state_ = ParameterState::gathered;
  if (counts) ++environment_.counts.all_gathers;
  if (counts && ahead) ++environment_.counts.fetched_ahead;
  return true;
}

void GatheredResidence::release() {
  if (plan_.resident || state_ == ParameterState::sharded) return;
  if (state_ == ParameterState::gathering) wait_or_drop();  // not needed, but being written
  if (state_ == ParameterState::gathered && plan_.keeps_copy_on_host && !copy_is_valid_) {
    state_ = ParameterState::resharding;
    const OwnMode mode;
    if (!copy_.defined()) copy_ = at::empty_like(line_, line_.options().device(at::kCPU));
    copy_.copy_(line_);
    copy_is_valid_ = true;
  }
  drop_line();
}

void GatheredResidence::publish() {
  if (state_ == ParameterState::gathering) wait_or_drop();
  if (!plan_.resident) drop_line();
  state_ = ParameterState::sharded;
  copy_is_valid_ = false;
  shard_.publish();
}

}  // namespace lockstep::parallel::detail
