// SPDX-License-Identifier: Apache-2.0
#include "lockstep/parallel/flat/flat_shard.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <array>

#include "lockstep/comm/collectives.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/parallel/intercept/recording.h"

namespace lockstep::parallel::detail {

FlatShard::FlatShard(FlatParameter& parameter, const ValueOf& value_of) : parameter_(parameter) {
  const at::NoGradGuard no_grad;
  const FlatPlan& plan = parameter_.plan();
  if (plan.is_own()) {
    for (const auto& own : plan.parameters) {
      const at::Tensor value = value_of(own);
      if (!value.is_same(own.tensor)) give_memory(own.tensor, value);
    }
  } else {
    make(value_of);
    tag_values();
    parameter_.make_views();
  }
  make_optimized();
}

FlatShard::~FlatShard() {
  // Tensors that the program still holds keep their values.
  optimized_.clear();
  if (encoded_ && storage_ && storage_.use_count() > 1) encoded_->open();
}

at::Tensor FlatShard::memory_for(int64_t count, at::ScalarType dtype) {
  const FlatPlan& plan = parameter_.plan();
  if (plan.offload) {
    const OffloadTiers& tiers = *plan.offload->tiers;
    const std::string what = "parameters of " + plan.name;
    const bool device = plan.offload->params == layout::Tier::device;
    if (plan.shard.size() == 1) {
      return device ? tiers.parameters_on_device(count, dtype, what, memory::Stay::long_time)
                    : tiers.on_host(count, dtype, what);
    }
    shares_.push_back((device ? tiers.device_budget : tiers.host_budget)
                          .take(static_cast<size_t>(count) * c10::elementSize(dtype), what));
  }
  if (count == 0 || plan.shard.size() == 1)
    return at::empty({count}, at::TensorOptions().dtype(dtype).device(plan.rest_device));
  const std::array<int64_t, 1> bytes{count * static_cast<int64_t>(c10::elementSize(dtype))};
  return comm::symmetric_empty(bytes, DType::uint8, plan.shard, plan.rest_device).view(dtype);
}

// Memory for codes, which peers read, and for the rest.
void FlatShard::make_encoded() {
  const FlatPlan& plan = parameter_.plan();
  const EncodedBlock block = encoded_block(parameter_, plan.shard.rank());
  at::Tensor remainders;
  if (plan.offload->param_codec == codec::Codec::lossless) {
    // Counted by the pages in use, not as a whole.
    const std::array<int64_t, 1> bytes{
        PackedValues::memory_size(parameter_.block().size(), plan.dtype)};
    sent_ = bytes[0] == 0 || plan.shard.size() == 1
                ? at::empty(bytes, at::kByte)
                : comm::symmetric_empty(bytes, DType::uint8, plan.shard);
  } else {
    sent_ = memory_for(static_cast<int64_t>(block.code_bytes), at::kByte);
    sent_.zero_();  // values that are zero are not written over what another model left there
    remainders = plan.offload->tiers->on_host(static_cast<int64_t>(block.remainder_bytes),
                                              at::kByte, "remainders of " + plan.name);
  }
  encoded_ = std::make_unique<EncodedShard>(parameter_, sent_, remainders);
  values_ = encoded_->values();
}

void FlatShard::open(bool to_write) const {
  if (!encoded_) return;
  encoded_->open();
  if (to_write) encoded_->note_written();
}

void FlatShard::settle() const {
  if (encoded_) encoded_->settle();
}

void FlatShard::make(const ValueOf& value_of) {
  const FlatPlan& plan = parameter_.plan();
  const layout::Range block = parameter_.block();
  const int64_t count = block.size();
  if (plan.is_encoded()) {
    make_encoded();
  } else if (plan.resident && plan.shard.size() > 1) {
    // Everybody has all of it: what this rank sends is a part of that.
    whole_line_ = memory_for(parameter_.layout().size, plan.gather_dtype);
    sent_ = whole_line_.narrow(0, block.begin, count);
  } else {
    sent_ = memory_for(count, plan.gather_dtype);
  }
  if (!encoded_) {
    values_ =
        plan.dtype == plan.gather_dtype ? sent_
        : plan.offload
            ? memory_for(count, plan.dtype)
            : at::empty({count}, at::TensorOptions().dtype(plan.dtype).device(plan.rest_device));
    values_.zero_();
  }
  for (size_t i = 0; i < parameter_.members().size(); ++i) {
    const Member& member = parameter_.members()[i];
    const at::Tensor value = value_of(plan.parameters[i]);
    if (member.shard_numel() == 0) continue;
    values_.narrow(0, member.shard_offset, member.shard_numel())
        .copy_(value.detach().reshape({-1}).narrow(0, member.rows.begin * member.row_size,
                                                   member.shard_numel()));
  }
  settle();
}

// Operators on what others are given of the values come to the engine.
void FlatShard::tag_values() {
  if (values_.numel() == 0) return;
  const FlatPlan& plan = parameter_.plan();
  names_ = std::make_shared<FlatNames>();
  // What is offloaded is updated while the model is used, and what only this rank has it sees.
  const bool watched = plan.shard.size() > 1 && values_.is_cpu() && !plan.offload;
  const auto width = values_.element_size();
  for (const Member& member : parameter_.members()) {
    if (member.shard_numel() == 0) continue;
    const auto begin = static_cast<size_t>(member.shard_offset) * width;
    names_->names.push_back(member.name);
    names_->bytes.push_back(static_cast<int64_t>(begin));
    if (watched) {
      stray_writes_.add(values_.data_ptr(), begin, static_cast<size_t>(member.shard_numel()),
                        width);
    }
  }
  if (encoded_) {
    fault_report_ = {
        values_.data_ptr(),
        values_.nbytes(),
        {.before = "lockstep error: the program reads or writes the memory of the shard of "
                   "parameter ",
         .names = names_,
         .after =
             format(" of unit {}, whose values are encoded. Operators decode them; data_ptr(), "
                    "accessors and kernels of your own need summon() of what fully_shard "
                    "returned (docs/offload.md)\n",
                    plan.unit)}};
  }
  Tag tag = parameter_.tag(Tag::Kind::shard, std::make_shared<at::Tensor>(values_));
  tag.names = names_;
  storage_ = make_storage(values_.data_ptr(), values_.nbytes(), values_.device(), std::move(tag));
}

void FlatShard::make_optimized() {
  const FlatPlan& plan = parameter_.plan();
  const auto& members = parameter_.members();
  if (!plan.trained || (!plan.is_own() && values_.numel() == 0)) return;
  const auto add = [&](const std::string& name, const layout::Shape& shape, int64_t begin,
                       size_t first, size_t end) {
    at::Tensor tensor = tagged_tensor(storage_, values_.scalar_type(), shape, begin);
    tensor.set_requires_grad(true);
    optimized_.push_back({name, tensor, {begin, begin + tensor.numel()}, first, end});
  };
  if (!plan.is_own() && plan.updates_as_one)
    return add(plan.name, {values_.numel()}, 0, 0, members.size());
  for (size_t i = 0; i < members.size(); ++i) {
    const Member& member = members[i];
    if (plan.is_own()) {
      optimized_.push_back({member.name, member.tensor, {}, i, i + 1});
    } else if (member.shard_numel() > 0) {
      add(member.name, member.shard_shape(), member.shard_offset, i, i + 1);
    }
  }
}

at::Tensor FlatShard::rows_of(const Member& member) const {
  if (!values_.defined()) return member.tensor.detach();
  wait_updated();
  const c10::InferenceMode normal(false);
  if (values_.numel() == 0) return values_.view(member.shard_shape());
  return tagged_tensor(storage_, values_.scalar_type(), member.shard_shape(), member.shard_offset);
}

at::Tensor FlatShard::gathered() const {
  wait_updated();
  const FlatPlan& plan = parameter_.plan();
  open(/*to_write=*/false);
  if (plan.shard.size() == 1) return values_;
  const at::NoGradGuard no_grad;
  const at::Tensor line = at::empty({parameter_.layout().size}, values_.options());
  comm::all_gather(line, values_, plan.reduce,
                   {.counts = parameter_.layout().counts(), .tag = plan.name})
      .wait();
  return line;
}

size_t FlatShard::bytes() const {
  if (encoded_) return encoded_->bytes();
  if (!values_.defined()) {
    size_t bytes = 0;
    for (const Member& member : parameter_.members()) bytes += member.tensor.nbytes();
    return bytes;
  }
  const size_t sent = whole_line_.defined() ? whole_line_.nbytes() : sent_.nbytes();
  return sent + (sent_.is_same(values_) ? 0 : values_.nbytes());
}

bool FlatShard::is_held() const {
  if (!storage_) return false;
  return storage_.use_count() > optimized_.size() + 1 ||
         std::any_of(optimized_.begin(), optimized_.end(),
                     [](const OptimizedTensor& each) { return each.tensor.use_count() > 1; });
}

void FlatShard::leave() {
  if (!values_.defined() || parameter_.plan().offload) return;
  parameter_.leave(
      std::make_shared<LeftShard>(LeftShard{values_, storage_, parameter_.layout().counts()}));
}

void FlatShard::publish() {
  if (encoded_) {
    // The thread of updates opens what LZ4 has packed.
    if (parameter_.plan().shard.size() > 1 || encoded_->is_lossless()) wait_updated();
    return settle();
  }
  const bool same = sent_.is_same(values_);
  if (parameter_.plan().shard.size() > 1 || !same) wait_updated();
  if (same) return;
  const at::NoGradGuard no_grad;
  sent_.copy_(values_);
}

void FlatShard::adopt_shown() {
  const at::Tensor& line = parameter_.shown();
  if (!line.defined()) return;
  const at::NoGradGuard no_grad;
  wait_updated();
  parameter_.outdate();
  if (line.is_same(values_)) return;
  const FlatPlan& plan = parameter_.plan();
  const layout::Range block = parameter_.block();
  const at::Tensor now = line.narrow(0, block.begin, block.size()).to(values_.device());
  if (encoded_) {
    // What was not written keeps what its codes have not.
    const auto dtype = plan.shard.size() == 1 ? plan.compute_dtype : plan.gather_dtype;
    const at::Tensor shown = at::zeros({block.size()}, values_.options().dtype(dtype));
    encoded_->decode_all(dtype, static_cast<std::byte*>(shown.data_ptr()));
    open(/*to_write=*/true);
    values_.copy_(
        at::where(now.eq(shown.to(now.scalar_type())), values_, now.to(values_.scalar_type())));
    return;
  }
  if (plan.gather_dtype == plan.dtype) {
    values_.copy_(now);
  } else {
    // What was not written keeps the bits that were lost on the way. What was sent may be the line
    // itself, where parameters stay whole.
    const at::Tensor shown = plan.shard.size() == 1 ? values_ : values_.to(plan.gather_dtype);
    values_.copy_(
        at::where(now.eq(shown.to(now.scalar_type())), values_, now.to(values_.scalar_type())));
  }
}

void FlatShard::wait_updated() const {
  if (values_.defined() && values_.is_cpu()) {
    updating_.wait();  // host memory is read by a thread, not by a stream
  } else {
    memory::compute_after(updating_, parameter_.plan().device);
  }
  updating_ = {};
}

void FlatShard::check_writes() const {
  const auto byte = stray_writes_.find();
  if (!byte) return;
  throw Error(format(
      "[fully_shard] the shard of parameter {} was written past torch's operators (data_ptr()) "
      "after parameters were used; write shards between a backward and the next forward, or call "
      "begin_update() on all ranks first",
      names_->at(static_cast<int64_t>(*byte))));
}

}  // namespace lockstep::parallel::detail
