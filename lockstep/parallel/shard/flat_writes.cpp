// SPDX-License-Identifier: Apache-2.0
// What is written into a flat's shard: how it is noticed, and shown to those who gather it.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

#include "lockstep/comm/collectives.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/parallel/shard/flat.h"

namespace lockstep::parallel::detail {

// Operators on what others are given of the shard come to the engine.
void Flat::tag_shard() {
  if (shard_.numel() == 0) return;
  shard_names_ = std::make_shared<FlatNames>();
  // What is offloaded is updated while the model is used, and what only this rank has it sees.
  const bool sealed = plan_.shard.size() > 1 && shard_.is_cpu() && !plan_.offload;
  const auto width = shard_.element_size();
  for (const Member& member : members_) {
    if (member.shard_numel() == 0) continue;
    const auto begin = static_cast<size_t>(member.shard_offset) * width;
    shard_names_->names.push_back(member.name);
    shard_names_->bytes.push_back(static_cast<int64_t>(begin));
    if (sealed) seal_.watch(begin, static_cast<size_t>(member.shard_numel()), width);
  }
  Tag shard_tag = tag(Tag::Kind::shard, std::make_shared<at::Tensor>(shard_));
  shard_tag.names = shard_names_;
  shard_storage_ =
      make_storage(shard_.data_ptr(), shard_.nbytes(), shard_.device(), std::move(shard_tag));
}

at::Tensor Flat::shard_of(const Member& member) const {
  if (plain_) return member.tensor.detach();
  wait_updated();
  const c10::InferenceMode normal(false);
  if (shard_.numel() == 0) return shard_.view(member.shard_shape());
  return tagged_tensor(shard_storage_, shard_.scalar_type(), member.shard_shape(),
                       member.shard_offset);
}

void Flat::make_stale() {
  if (plain_ || in_place_) return;
  kept_is_valid_ = false;
  stale_ = true;
  release();
}

void Flat::outdate() {
  if (plain_) return;
  if (!in_place_) {
    kept_is_valid_ = false;
    stale_ = true;
  }
  for (const Member& member : members_) member.tensor.unsafeGetTensorImpl()->bump_version();
}

void Flat::seal() {
  if (!plain_) seal_.close(shard_.data_ptr());
}

void Flat::check_sealed() const {
  const auto byte = plain_ ? std::nullopt : seal_.broken_at(shard_.data_ptr());
  if (!byte) return;
  throw Error(format(
      "[fully_shard] the shard of parameter {} was written past torch's operators (data_ptr()) "
      "after parameters were used; write shards between a backward and the next forward, or call "
      "begin_update() on all ranks first",
      shard_names_->at(static_cast<int64_t>(*byte))));
}

void Flat::publish() {
  if (plain_) return;
  const bool same = sent_.is_same(shard_);
  if (plan_.shard.size() > 1 || !same) wait_updated();
  if (same) return;
  const at::NoGradGuard no_grad;
  sent_.copy_(shard_);
}

void Flat::write_back() {
  if (plain_) return;
  const at::NoGradGuard no_grad;
  kept_is_valid_ = false;
  wait_updated();
  for (const Member& member : members_) member.tensor.unsafeGetTensorImpl()->bump_version();
  if (in_place_) return;
  const at::Tensor now = line_.narrow(0, block().begin, block().size()).to(shard_.device());
  if (plan_.gather_dtype == plan_.dtype) {
    shard_.copy_(now);
  } else {
    // What was not written keeps the bits that were lost on the way. What was sent may be the line
    // itself, where parameters stay whole.
    const at::Tensor shown = plan_.shard.size() == 1 ? shard_ : shard_.to(plan_.gather_dtype);
    shard_.copy_(
        at::where(now.eq(shown.to(now.scalar_type())), shard_, now.to(shard_.scalar_type())));
  }
}

at::Tensor Flat::gathered_shards() const {
  wait_updated();
  if (plan_.shard.size() == 1) return shard_;
  const at::NoGradGuard no_grad;
  const at::Tensor line = at::empty({layout_.size}, shard_.options());
  comm::all_gather(line, shard_, plan_.reduce, {.counts = layout_.counts(), .tag = plan_.name})
      .wait();
  return line;
}

}  // namespace lockstep::parallel::detail
