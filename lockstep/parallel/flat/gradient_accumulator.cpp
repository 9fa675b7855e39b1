// SPDX-License-Identifier: Apache-2.0
#include "lockstep/parallel/flat/gradient_accumulator.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "lockstep/comm/collectives.h"

namespace lockstep::parallel::detail {

GradientAccumulator::GradientAccumulator(FlatParameter& parameter, FlatShard& shard,
                                         FlatEnvironment& environment, bool keeps_line)
    : plan_(parameter.plan()),
      parameter_(parameter),
      shard_(shard),
      environment_(environment),
      filled_(parameter.members().size(), false),
      versions_(parameter.members().size()),
      keeps_line_(keeps_line) {
  for (const Member& member : members()) names_.push_back(member.name);
}

bool GradientAccumulator::same_memory(const at::Tensor& a, const at::Tensor& b) {
  return a.layout() == b.layout() && a.data_ptr() == b.data_ptr() && a.strides() == b.strides() &&
         a.scalar_type() == b.scalar_type();
}

at::Tensor GradientAccumulator::dense(const at::Tensor& gradient) {
  return gradient.is_sparse() ? gradient.to_dense() : gradient;
}

at::Tensor GradientAccumulator::line_view(size_t member) const {
  const Member& place = members()[member];
  return line_.narrow(0, place.offset, place.numel()).view(place.shape);
}

void GradientAccumulator::open_line(const MakeRoom& make_room) {
  if (line_.defined()) return;
  const int64_t size = parameter_.layout().size;
  const auto bytes = size * static_cast<int64_t>(c10::elementSize(plan_.reduce_dtype));
  if (!block_.defined()) {
    GradientMemory& memory = environment_.gradient_memory;
    block_ = keeps_line_ ? memory.keep(static_cast<size_t>(bytes))
                         : memory.take(static_cast<size_t>(bytes), make_room);
  }
  line_ = block_.narrow(0, 0, bytes).view(plan_.reduce_dtype);
  // What is between parameters goes through the optimizer too.
  for (const Member& member : members()) {
    const int64_t end = member.offset + member.numel();
    const int64_t next = &member == &members().back() ? size : (&member + 1)->offset;
    if (next > end) line_.narrow(0, end, next - end).zero_();
  }
  restore();
}

void GradientAccumulator::close_line(const memory::Event& unused) {
  if (keeps_line_) return;
  if (block_.defined()) environment_.gradient_memory.busy_until(block_, unused);
  line_.reset();
  block_.reset();
}

void GradientAccumulator::stop_keeping_line() {
  if (!keeps_line_) return;
  keeps_line_ = false;
  if (!block_.defined()) return;
  environment_.gradient_memory.let_go(block_);
  line_.reset();
  block_.reset();
}

void GradientAccumulator::begin_round(bool is_last) {
  is_last_round_ = is_last;
  arrived_.assign(members().size(), false);
  num_arrived_ = 0;
}

void GradientAccumulator::arrive(size_t member, const MakeRoom& make_room) {
  const at::NoGradGuard no_grad;
  open_line(make_room);
  collect(member, line_view(member));
  filled_[member] = true;
  if (!arrived_[member]) ++num_arrived_;
  arrived_[member] = true;
}

void GradientAccumulator::fill_gaps() {
  for (size_t i = 0; i < members().size(); ++i) {
    if (!filled_[i]) fill_gap(i, line_view(i));
  }
}

void GradientAccumulator::launch(const MakeRoom& make_room, Leaf leaf) {
  const at::NoGradGuard no_grad;
  before_launch();
  open_line(make_room);
  fill_gaps();
  const bool ordered = plan_.reproducible;
  if (ordered && leaf.index) {
    if (leaf.is_new) sum_.push(line_, leaf.index);
    sum_.write_sum(line_);
  } else if (ordered) {
    sum_.finish(line_);
  }
  if (environment_.observe) environment_.observe(line_, names_);
  in_flight_ = true;
  if (!plan_.scatters()) {
    const comm::ReduceOptions average{.op = comm::ReduceOp::avg, .tag = plan_.name};
    reducing_ = ordered ? comm::all_reduce_ordered(line_, plan_.gradient_group(), average)
                        : comm::all_reduce(line_, plan_.gradient_group(), average);
    return;
  }
  reduced_ = scatter_target();
  const comm::ReduceScatterOptions scatter{
      .op = comm::ReduceOp::avg, .counts = parameter_.layout().counts(), .tag = plan_.name};
  reducing_ = ordered ? comm::reduce_scatter_ordered(reduced_, line_, plan_.reduce, scatter)
                      : comm::reduce_scatter(reduced_, line_, plan_.reduce, scatter);
}

void GradientAccumulator::wait_reduced() {
  if (!in_flight_) return;
  const at::NoGradGuard no_grad;
  in_flight_ = false;
  std::exchange(reducing_, {}).wait();
  if (plan_.scatters() && plan_.replicas.size() > 1) {
    const comm::ReduceOptions average{.op = comm::ReduceOp::avg, .tag = plan_.name};
    (plan_.reproducible ? comm::all_reduce_ordered(reduced_, plan_.replicas, average)
                        : comm::all_reduce(reduced_, plan_.replicas, average))
        .wait();
  }
  finalized_ = false;
  if (plan_.scatters()) {
    close_line();
  } else {
    const layout::Range block = parameter_.block();
    reduced_ = line_.narrow(0, block.begin, block.size());
  }
  // Whether anybody used it need not be asked where this rank did.
  if (is_complete()) finalize_gradients(std::vector<int64_t>(members().size(), 1));
}

void GradientAccumulator::finalize_gradients(std::span<const int64_t> num_ranks) {
  if (finalized_) return;
  const at::NoGradGuard no_grad;
  finalized_ = true;
  deliver(num_ranks);
  filled_.assign(members().size(), false);
  give_back();
  reduced_.reset();
}

void GradientAccumulator::give_back() {
  if (!plan_.scatters()) close_line();
}

void GradientAccumulator::show_whole_gradients(std::span<const int64_t> num_ranks,
                                               at::ScalarType dtype) {
  for (size_t i = 0; i < members().size(); ++i) {
    at::Tensor& gradient = members()[i].tensor.mutable_grad();
    if (num_ranks[i] == 0) {
      // Its place has been filled with zeros: not by the user.
      if (versions_[i] && gradient.defined()) versions_[i] = gradient._version();
      continue;
    }
    const at::Tensor place = line_view(i);
    if (dtype != plan_.reduce_dtype) {
      gradient = place.to(dtype);
    } else if (!gradient.defined() || !same_memory(gradient, place)) {
      gradient = place.detach();
      versions_[i] = gradient._version();
    }
  }
}

void GradientAccumulator::add_to_sum(const MakeRoom& make_room,
                                     std::optional<int64_t> micro_batch) {
  const at::NoGradGuard no_grad;
  open_line(make_room);
  fill_gaps();
  sum_.push(line_, micro_batch);
  for (const Member& member : members()) member.tensor.mutable_grad().reset();
  versions_.assign(members().size(), std::nullopt);
  close_line();
  filled_.assign(members().size(), false);
}

void GradientAccumulator::abandon() {
  sum_ = {};
  if (in_flight_) {
    in_flight_ = false;
    std::exchange(reducing_, {}).wait();
  }
  finalized_ = true;
  reduced_.reset();
  close_line();
  filled_.assign(members().size(), false);
}

}  // namespace lockstep::parallel::detail
