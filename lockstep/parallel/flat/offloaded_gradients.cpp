// SPDX-License-Identifier: Apache-2.0
#include "lockstep/parallel/flat/offloaded_gradients.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>

namespace lockstep::parallel::detail {
namespace {

// Whole gradients are there to be looked at after backward, so they keep their memory; unless they
// leave it in the meantime.
bool keeps_line(const FlatPlan& plan) {
  return !plan.scatters() && plan.offload->grads == layout::Tier::device &&
         !plan.offload->tiers->updates_in_backward();
}

}  // namespace

OffloadedGradients::OffloadedGradients(FlatParameter& parameter, FlatShard& shard,
                                       FlatEnvironment& environment)
    : ShardedGradients(parameter, shard, environment, detail::keeps_line(parameter.plan())) {
  if (!packs() || shard.optimized().empty()) return;
  packed_ = make_packed(shard.values().numel(), plan_.gradient_dtype, "gradients of " + plan_.name);
  const at::Tensor& values = packed_->values();
  Tag tag = parameter.tag(Tag::Kind::packed, std::make_shared<at::Tensor>(values));
  tag.names = shard.names();
  packed_storage_ = make_storage(values.data_ptr(), values.nbytes(), at::kCPU, std::move(tag));
}

OffloadedGradients::~OffloadedGradients() {
  // Tensors that the program still holds keep their values.
  if (!packed_) return;
  for (const OptimizedTensor& each : shard_.optimized()) {
    at::Tensor& gradient = each.tensor.mutable_grad();
    if (each.tensor.use_count() == 1 && gradient.defined() && owns(gradient)) gradient.reset();
  }
  if (packed_storage_.use_count() > 1 && packed_->bytes() > 0) packed_->open();
}

void OffloadedGradients::begin_round(bool is_last) {
  ShardedGradients::begin_round(is_last);
  const bool has_some =
      accumulates() || std::ranges::count(unreduced_members(), true) > 0 || !sum_.is_empty();
  if (!leaves_ || has_some) return;
  leaves_ = false;
  parameter_.offload().grads = layout::Tier::host;
  // An update of a flat that the forward did not use may still read them.
  if (gradient_.defined())
    tiers().retire(std::make_shared<at::Tensor>(std::exchange(gradient_, {})), shard_.updating());
  stop_keeping_line();
}

std::vector<bool>& OffloadedGradients::unreduced_members() {
  return in_spilled_.empty() ? filled_ : in_spilled_;
}

void OffloadedGradients::zero_gradient(size_t member) {
  ShardedGradients::zero_gradient(member);
  if (!in_spilled_.empty()) in_spilled_[member] = false;
}

bool OffloadedGradients::hands_over() const {
  return tiers().updates_in_backward() && is_last_round_;
}

at::Tensor OffloadedGradients::gradient_memory() {
  if (keeps_line() && plan_.gradient_dtype == plan_.reduce_dtype)
    return line_;  // a group of one: all of it is this rank's
  const std::string what = "gradients of " + plan_.name;
  const int64_t count = shard_.values().numel();
  if (packed_) return packed_->values();
  return rests_on_host() ? tiers().on_host(count, plan_.gradient_dtype, what)
                         : tiers().on_device(count, plan_.gradient_dtype, what);
}

at::Tensor OffloadedGradients::scatter_target() {
  if (packed_) begin_packed();  // it may be what LZ4 compresses
  return ShardedGradients::scatter_target();
}

at::Tensor OffloadedGradients::scratch(int64_t count) {
  tiers().make_room(static_cast<size_t>(count) * c10::elementSize(line_.scalar_type()));
  return tiers().on_device(count, line_.scalar_type(), "gradients of " + plan_.name,
                           memory::Stay::short_time);
}

void OffloadedGradients::deliver(std::span<const int64_t> num_ranks) {
  consumed_ = hands_over() && !accumulates();
  if (!consumed_) make_gradient();
  if (packed_ && !has_begun_) begin_packed();
  ShardedGradients::deliver(num_ranks);
  if (!packed_) return;
  has_begun_ = false;
  end(*packed_, is_fresh_);
}

std::unique_ptr<PackedGradient> OffloadedGradients::make_packed(int64_t count, at::ScalarType dtype,
                                                                const std::string& what) const {
  return std::make_unique<PackedGradient>(count, dtype, tiers(), what);
}

// Gradients on their way to LZ4 have memory of their own, in addition to the budget: of those that
// are being compressed, and of the next.
void OffloadedGradients::begin(PackedGradient& packed) {
  constexpr size_t kAtOnce = 2;
  auto& packing = tiers().packing;
  for (; packing.size() >= kAtOnce; packing.pop_front()) packing.front().wait();
  packed.begin();
}

void OffloadedGradients::end(PackedGradient& packed, bool has_begun) {
  tiers().driver->wait(moved_);
  tiers().driver->run([&packed] { packed.settle(); }, plan_.name);
  settled_ = tiers().driver->record();
  if (has_begun) tiers().packing.push_back(settled_);
}

void OffloadedGradients::begin_packed() {
  wait_unused();
  is_fresh_ = std::ranges::none_of(shard_.optimized(), [&](const OptimizedTensor& each) {
    return each.tensor.grad().defined() && owns(each.tensor.grad());
  });
  if (is_fresh_) begin(*packed_);
  has_begun_ = true;
  is_open_ = false;  // end() settles it
}

void OffloadedGradients::wait_unused() const {
  shard_.updating().wait();  // which reads them
  moved_.wait();
  settled_.wait();
}

void OffloadedGradients::wait_delivered() {
  std::exchange(moved_, {}).wait();
  std::exchange(settled_, {}).wait();
}

void OffloadedGradients::open() {
  if (!packed_) return;
  wait_unused();
  packed_->open();
  is_open_ = true;
}

void OffloadedGradients::settle() {
  if (!std::exchange(is_open_, false)) return;  // an update that reads them need not be waited for
  wait_unused();
  packed_->settle();
}

at::Tensor OffloadedGradients::shown_at(const OptimizedTensor& target) const {
  if (!packed_) return place_of(target);
  return tagged_tensor(packed_storage_, gradient_.scalar_type(), target.tensor.sizes(),
                       target.range.begin);
}

size_t OffloadedGradients::bytes() const {
  return packed_ ? packed_->bytes() : ShardedGradients::bytes();
}

void OffloadedGradients::deliver_one(const OptimizedTensor& target, const at::Tensor& arrived) {
  at::Tensor& gradient = target.tensor.mutable_grad();
  if (consumed_) {
    gradient = arrived.to(plan_.gradient_dtype).view(target.tensor.sizes()).detach();
  } else if (packed_ && gradient_.data_ptr() == reduced_.data_ptr()) {
    gradient = shown_at(target);
  } else if (rests_on_host() && gradient_.data_ptr() != reduced_.data_ptr()) {
    const bool adds = gradient.defined();
    if (!adds) gradient = shown_at(target);
    send_to_host(owns(gradient) ? values_of(target) : gradient, arrived, adds);
  } else {
    ShardedGradients::deliver_one(target, arrived);
  }
}

void OffloadedGradients::send_to_host(const at::Tensor& gradient, const at::Tensor& arrived,
                                      bool adds) {
  const at::Tensor source = arrived.to(gradient.scalar_type());
  memory::Queue& send = *tiers().send;
  send.wait(memory::computed(plan_.device));
  send.wait(shard_.updating());  // which reads what was there
  // What others have in packed_ stays: the driver opens it first.
  PackedGradient* const opened = packed_ && !is_fresh_ ? packed_.get() : nullptr;
  if (!adds && opened == nullptr) {
    tiers().to_host(send, gradient.data_ptr(), source.data_ptr(), source.nbytes(), plan_.name);
    moved_ = send.record();
  } else {
    const at::Tensor stage = tiers().stage(source.numel(), source.scalar_type());
    tiers().to_host(send, stage.data_ptr(), source.data_ptr(), source.nbytes(), plan_.name);
    tiers().driver->wait(send.record());
    tiers().driver->run(
        [sum = gradient.view({-1}), stage, adds, opened] {
          const at::NoGradGuard no_grad;
          if (opened != nullptr) opened->open();
          adds ? sum.add_(stage) : sum.copy_(stage);
        },
        "add gradients");
    moved_ = tiers().driver->record();
    tiers().return_stage(stage, moved_);
  }
  tiers().retire(std::make_shared<at::Tensor>(source), moved_);
}

void OffloadedGradients::give_back() {
  if (hands_over()) {
    tiers().take_gradients(parameter_.index());  // lets go of them
  } else if (!plan_.scatters()) {
    close_line(moved_);
  }
}

void OffloadedGradients::spill() {
  if (!rests_on_host() || !line_.defined() || plan_.reproducible) return;
  const at::NoGradGuard no_grad;
  fill_gaps();
  const std::string what =
      "unreduced gradients of " + plan_.name + " (NoSyncGradients::sharded needs less)";
  const int64_t size = parameter_.layout().size;
  if (packs()) {
    if (!packed_line_) packed_line_ = make_packed(size, plan_.reduce_dtype, what);
    wait_unused();
    begin(*packed_line_);
    spilled_ = packed_line_->values();
  } else if (!spilled_.defined()) {
    spilled_ = tiers().on_host(size, plan_.reduce_dtype, what);
  }
  memory::Queue& send = *tiers().send;
  send.wait(memory::computed(plan_.device));
  tiers().to_host(send, spilled_.data_ptr(), line_.data_ptr(), line_.nbytes(), plan_.name);
  moved_ = send.record();
  if (packs()) end(*packed_line_, /*has_begun=*/true);
  in_spilled_ = std::exchange(filled_, std::vector<bool>(members().size(), false));
  close_line(moved_);
}

void OffloadedGradients::restore() {
  if (in_spilled_.empty()) return;
  memory::Queue& fetch = *tiers().fetch;
  fetch.wait(memory::computed(plan_.device));
  fetch.wait(moved_);
  if (packs()) {
    settled_.wait();
    packed_line_->open();
  }
  tiers().to_device(fetch, line_.data_ptr(), spilled_.data_ptr(), line_.nbytes(), plan_.name);
  moved_ = fetch.record();
  memory::compute_after(moved_, plan_.device);
  if (packs()) end(*packed_line_, /*has_begun=*/false);
  filled_ = std::exchange(in_spilled_, {});
}

void OffloadedGradients::abandon() {
  in_spilled_.clear();
  has_begun_ = false;
  ShardedGradients::abandon();
}

bool OffloadedGradients::owns(const at::Tensor& gradient) const {
  if (!gradient_.defined()) return false;
  const auto* const begin = static_cast<const std::byte*>(gradient_.data_ptr());
  const auto* const data = static_cast<const std::byte*>(gradient.data_ptr());
  return data >= begin && data < begin + gradient_.nbytes();
}

void OffloadedGradients::let_go(const memory::Event& read) {
  for (const OptimizedTensor& each : shard_.optimized()) each.tensor.mutable_grad().reset();
  if (!reduced_.defined()) return;
  tiers().retire(std::make_shared<at::Tensor>(reduced_), read);
  if (!plan_.scatters()) close_line(read);
}

}  // namespace lockstep::parallel::detail
