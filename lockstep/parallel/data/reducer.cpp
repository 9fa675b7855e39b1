// SPDX-License-Identifier: Apache-2.0
#include "lockstep/parallel/data/reducer.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <numeric>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/control/missing_peer.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/log.h"
#include "lockstep/core/trace.h"
#include "lockstep/parallel/data/sparse_average.h"

namespace lockstep::parallel::detail {
namespace {

bool same_memory(const at::Tensor& a, const at::Tensor& b) {
  return a.layout() == b.layout() && a.data_ptr() == b.data_ptr() && a.strides() == b.strides() &&
         a.scalar_type() == b.scalar_type();
}

// In the flags that ranks compare. Above any number of ranks, so that a sum shows them.
constexpr int64_t kStopped = int64_t{1} << 24;  // no gradient where the first step had one
constexpr int64_t kLate = int64_t{1} << 44;     // a gradient that came too late

}  // namespace

Reducer::Reducer(std::vector<Parameter> parameters, std::vector<Parameter> frozen,
                 comm::Group group, const DdpOptions& options)
    : parameters_(std::move(parameters)),
      frozen_(std::move(frozen)),
      group_(std::move(group)),
      options_(options),
      states_(parameters_.size()) {
  // Backward produces gradients roughly in reverse; the first step tells better.
  order_.resize(parameters_.size());
  std::iota(order_.rbegin(), order_.rend(), size_t{0});
  use_buckets(plan());
}

void Reducer::start() {
  const std::lock_guard lock(rounds_.mutex());
  std::vector<at::Tensor> tensors;
  for (const Parameter& parameter : parameters_) tensors.push_back(parameter.tensor);
  rounds_.listen(tensors, weak_from_this());
}

at::Tensor& Reducer::view(size_t index) {
  return buckets_[states_[index].bucket].gradients[states_[index].place];
}

// Whether buckets go out before the end of backward. Not while it is being learned how often each
// gradient arrives.
bool Reducer::overlaps() const {
  return !options_.advanced.delay_all_reduce && (learned_ || !options_.static_graph);
}

BucketPlan Reducer::plan() const {
  // A bucket size below the first bucket's holds for the first one, too.
  const size_t first = std::min(options_.advanced.first_bucket_bytes, options_.bucket_bytes);
  return plan_buckets(parameters_, order_, first, options_.bucket_bytes);
}

void Reducer::use_buckets(const BucketPlan& plan) {
  const c10::AutoGradMode no_grad(false);
  completions_.clear();  // they hold the old ones
  std::vector<Bucket> buckets = make_buckets(parameters_, plan, group_);
  std::vector<SumTree> sums = sums_for(buckets);
  for (State& state : states_) state.in_bucket = false;
  for (size_t b = 0; b < buckets.size(); ++b) {
    for (size_t place = 0; place < buckets[b].members.size(); ++place) {
      const size_t index = buckets[b].members[place];
      State& state = states_[index];
      state.bucket = b;
      state.place = place;
      state.in_bucket = true;
      // Gradients move along, so that the old buckets can go.
      at::Tensor& gradient = parameters_[index].tensor.mutable_grad();
      if (gradient.defined() && !gradient.is_sparse() && !buckets[b].sparse &&
          options_.advanced.gradient_as_bucket_view) {
        buckets[b].gradients[place].copy_(gradient);
        gradient = buckets[b].gradients[place].detach();
      }
    }
  }
  buckets_ = std::move(buckets);
  sums_ = std::move(sums);
}

// Reproducible mode, in the middle of an accumulation: its partial sums, laid out as the buckets
// are. All buckets' trees have the same places.
std::vector<SumTree> Reducer::sums_for(const std::vector<Bucket>& buckets) const {
  std::vector<SumTree> trees(buckets.size());
  if (sums_.empty() || sums_[0].is_empty()) return trees;
  const auto part = [](const at::Tensor& sum, const Bucket& bucket, size_t place) {
    const at::Tensor& view = bucket.gradients[place];
    return sum.as_strided(view.sizes(), view.strides(),
                          view.storage_offset() - bucket.flat.storage_offset());
  };
  for (size_t b = 0; b < buckets.size(); ++b) {
    trees[b] = sums_[0].laid_out([&](const SumTree::Place& at) {
      const at::Tensor sum = at::zeros_like(buckets[b].flat);
      for (size_t place = 0; place < buckets[b].members.size(); ++place) {
        const State& old = states_[buckets[b].members[place]];
        part(sum, buckets[b], place)
            .copy_(part(sums_[old.bucket].sum(at), buckets_[old.bucket], old.place));
      }
      return sum;
    });
  }
  return trees;
}

void Reducer::check_between_rounds(const char* operation) {
  const std::lock_guard lock(rounds_.mutex());
  if (rounds_.is_between_rounds()) return;
  throw ConfigError(format("[ddp] rank {}: {} during a backward; call it before or after one",
                           group_.rank(), operation));
}

void Reducer::lay_out_again() {
  const std::lock_guard lock(rounds_.mutex());
  use_buckets(plan());
}

void Reducer::drop_accumulated() {
  const std::lock_guard lock(rounds_.mutex());
  for (State& state : states_) state.unreduced = false;
  sums_.assign(buckets_.size(), {});
}

// A backward that threw never reached its end. Peers may be in the collectives that it began, and
// its buckets must not be written before those are done.
void Reducer::abandon_round() {
  for (const auto& complete : completions_) {
    try {
      complete();
    } catch (const std::exception& error) {
      log::warn(
          format("[ddp] rank {}: after a backward that failed: {}", group_.rank(), error.what()));
    }
  }
  sums_.assign(buckets_.size(), {});
}

Attendance Reducer::take_part(Activity activity) {
  const Attendance attendance = announce(activity, group_);
  if (attendance.active > 0) leader_ = attendance.leader;
  return attendance;
}

bool Reducer::open_round(bool in_backward) {
  if (in_backward && !syncing_ && !options_.reproducible) return false;
  in_backward_ = in_backward;
  round_syncs_ = !in_backward || syncing_;
  num_launched_ = 0;
  completions_.clear();
  arrival_order_.clear();
  num_missing_.clear();
  for (const Bucket& bucket : buckets_) num_missing_.push_back(bucket.members.size());
  for (State& state : states_) {
    state.staged = false;
    state.arrivals = 0;
    state.late = false;
  }
  if (shadowing_) return true;
  attendance_ = {.activity = Activity::gradients, .active = group_.size(), .leader = 0};
  if (round_syncs_ && options_.uneven_inputs) attendance_ = take_part(Activity::gradients);
  for (size_t i = 0; i < parameters_.size() && !in_backward; ++i) {
    states_[i].arrivals = states_[i].expected;
    if (parameters_[i].tensor.grad().defined()) states_[i].unreduced = true;
  }
  return true;
}

void Reducer::begin_backward() {
  const std::lock_guard lock(rounds_.mutex());
  rounds_.begin_backward();
}

void Reducer::on_gradient(size_t index, bool /*is_new*/) {
  if (!parameters_[index].tensor.grad().defined()) return;
  states_[index].unreduced = true;
  const std::lock_guard lock(rounds_.mutex());
  if (recorded_) return record(index);
  rounds_.begin_backward();
  if (!rounds_.is_open()) return;
  State& state = states_[index];
  ++state.arrivals;
  if (!state.in_bucket) return;  // found at the end of the round
  if (state.bucket < num_launched_) {
    state.late = true;  // all ranks hear of it at the end of the round
    return;
  }
  if (options_.static_graph && learned_ && state.arrivals != state.expected) return;
  stage(index);
  launch_full_buckets();
}

// Moves a gradient to where it is reduced from.
void Reducer::stage(size_t index) {
  const c10::AutoGradMode no_grad(false);
  State& state = states_[index];
  if (!state.staged) {
    state.staged = true;
    --num_missing_[state.bucket];
    arrival_order_.push_back(index);
  }
  if (buckets_[state.bucket].sparse) return;
  at::Tensor& gradient = parameters_[index].tensor.mutable_grad();
  at::Tensor& target = view(index);
  if (!gradient.defined()) {
    target.zero_();
  } else if (!same_memory(gradient, target)) {
    target.copy_(gradient.is_sparse() ? gradient.to_dense() : gradient);
    if (options_.advanced.gradient_as_bucket_view) gradient = target.detach();
  }
}

void Reducer::launch_full_buckets() {
  if (!round_syncs_ || !overlaps()) return;
  while (num_launched_ < buckets_.size() && num_missing_[num_launched_] == 0)
    launch(num_launched_++);
}

void Reducer::launch(size_t position) {
  Bucket& bucket = buckets_[position];
  const c10::AutoGradMode no_grad(false);
  const double scale = static_cast<double>(group_.size()) / attendance_.active;
  if (bucket.sparse) {
    const size_t index = bucket.members[0];
    at::Tensor& gradient = parameters_[index].tensor.mutable_grad();
    const at::Tensor mine = !gradient.defined() || gradient.is_sparse()
                                ? gradient
                                : gradient.to_sparse(1);  // a user's own dense one
    completions_.push_back(
        [&bucket, scale,
         finish = begin_sparse_average(mine, parameters_[index].tensor, group_, bucket.tag)] {
          bucket.flat = finish();
          if (scale != 1) bucket.flat = bucket.flat * scale;
        });
    return;
  }
  if (options_.reproducible && micro_batch_) {
    if (in_backward_) sums_[position].push(bucket.flat, micro_batch_);
    sums_[position].write_sum(bucket.flat);
  } else if (options_.reproducible) {
    sums_[position].finish(bucket.flat);
  }
  if (options_.advanced.observe) options_.advanced.observe(bucket.flat, bucket.names);
  std::function<void()> complete;
  if (options_.hook) {
    complete = options_.hook(bucket, group_);
  } else {
    const comm::ReduceOptions how{.op = comm::ReduceOp::avg, .tag = bucket.tag};
    complete = [work = options_.reproducible
                           ? comm::all_reduce_ordered(bucket.flat, group_, how)
                           : comm::all_reduce(bucket.flat, group_, how)]() mutable { work.wait(); };
  }
  completions_.push_back([complete, scale, flat = bucket.flat] {
    if (complete) complete();
    if (scale != 1) flat.mul_(scale);
  });
}

void Reducer::close_round() {
  if (round_syncs_) {
    comm::with_peer_hint(options_.uneven_inputs ? kJoin : kUnevenInputs,
                         [this] { average_round(); });
  } else {
    accumulate_round();
  }
}

// Reproducible mode, under no_sync: the micro-batch becomes a leaf of the tree of sums.
void Reducer::accumulate_round() {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!states_[i].in_bucket) continue;
    if (!states_[i].staged) stage(i);
    parameters_[i].tensor.mutable_grad().reset();
  }
  for (size_t b = 0; b < buckets_.size(); ++b) sums_[b].push(buckets_[b].flat, micro_batch_);
}

void Reducer::average_round() {
  const trace::Span span("ddp", "finish gradients");
  const at::Tensor totals = flags();
  const at::Tensor mine = totals.clone();
  for (State& state : states_) state.unreduced = false;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (states_[i].in_bucket && !states_[i].staged) stage(i);
  }
  while (num_launched_ < buckets_.size()) launch(num_launched_++);
  comm::Work comparing = comm::all_reduce(totals, group_, {.tag = "which gradients there are"});
  for (const auto& complete : completions_) complete();
  comparing.wait();
  check_flags(totals, mine);
  finalize_gradients(totals);
  // Not from sync_gradients, where nothing arrives; ranks that shadow hear which it was.
  const int64_t in_backward = totals[totals.numel() - 1].item<int64_t>();
  if (!learned_ && in_backward > 0) learn(totals);
}

// A parameter that was frozen when the wrapper was made, and has a gradient now; null: none has.
const Parameter* Reducer::thawed() const {
  const auto found = std::ranges::find_if(frozen_, [](const Parameter& parameter) {
    return parameter.tensor.requires_grad() && parameter.tensor.grad().defined();
  });
  return found == frozen_.end() ? nullptr : &*found;
}

// What this rank has to tell the others: for each parameter, then whether it takes part, whether a
// frozen one is trained, and whether this is a backward.
at::Tensor Reducer::flags() const {
  const at::Tensor flags = at::zeros({static_cast<int64_t>(parameters_.size()) + 3}, at::kLong);
  if (shadowing_) return flags;
  int64_t* const flag = flags.data_ptr<int64_t>();
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const State& state = states_[i];
    // What no_sync left may have been dropped since; in reproducible mode it is in the sums.
    const bool unreduced =
        state.unreduced && (options_.reproducible || parameters_[i].tensor.grad().defined());
    flag[i] = unreduced ? 1 : 0;
    if (state.late || (unreduced && !state.in_bucket)) flag[i] = kLate;
    if (options_.static_graph && learned_ && state.arrivals != state.expected)
      flag[i] = state.arrivals < state.expected ? kStopped : kLate;
  }
  flag[parameters_.size()] = 1;
  flag[parameters_.size() + 1] = thawed() != nullptr ? 1 : 0;
  flag[parameters_.size() + 2] = in_backward_ ? 1 : 0;
  return flags;
}

void Reducer::check_flags(const at::Tensor& totals, const at::Tensor& mine) const {
  const bool needs_all = !options_.find_unused_parameters && !options_.static_graph;
  const int64_t* const total = totals.data_ptr<int64_t>();
  const int64_t active = total[parameters_.size()];
  if (total[parameters_.size() + 1] > 0) {
    const Parameter* const mine_too = thawed();
    throw Error(format(
        "[ddp] parameter {} is trained, but was frozen when the wrapper was made: its gradients "
        "are not averaged; unfreeze first, then make the wrapper",
        mine_too != nullptr ? mine_too->name : "of another rank"));
  }
  const auto bad = [&](int64_t value) {
    return value >= kStopped || (needs_all && value < active);
  };
  std::vector<size_t> wrong;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (bad(total[i])) wrong.push_back(i);
  }
  if (wrong.empty()) return;

  // All ranks know that something is wrong, so all can ask who it is.
  const at::Tensor all = at::empty({group_.size(), mine.numel()}, at::kLong);
  comm::all_gather(all, mine, group_, {.tag = "which gradients are missing"}).wait();
  std::vector<int> ranks;
  for (int rank = 0; rank < group_.size(); ++rank) {
    const int64_t* const flag = all[rank].data_ptr<int64_t>();
    if (flag[parameters_.size()] == 0) continue;
    if (flag[wrong[0]] >= kStopped || (total[wrong[0]] < kStopped && flag[wrong[0]] == 0))
      ranks.push_back(rank);
  }
  std::vector<std::string> names;
  for (const size_t i : wrong) names.push_back(parameters_[i].name);
  const int64_t kind = total[wrong[0]];
  const char* const what = kind >= kLate      ? "got another gradient after its own was sent"
                           : kind >= kStopped ? "got no gradient, unlike in the first step,"
                                              : kNoGradient;
  const char* const rule =
      options_.static_graph
          ? "under static_graph all steps must use the same parameters equally often"
      : kind >= kLate
          ? "if every step does this (recomputed blocks that share it), set static_graph"
          : kMayBeUnused;
  throw Error(wrong_gradients(names, what, ranks, group_.size(), rule));
}

// Gives every parameter its averaged gradient.
void Reducer::finalize_gradients(const at::Tensor& totals) {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    State& state = states_[i];
    if (!state.in_bucket || totals.data_ptr<int64_t>()[i] == 0) continue;
    at::Tensor& gradient = parameters_[i].tensor.mutable_grad();
    if (buckets_[state.bucket].sparse) {
      gradient = std::exchange(buckets_[state.bucket].flat, {});
    } else if (options_.advanced.gradient_as_bucket_view) {
      if (!gradient.defined() || !same_memory(gradient, view(i))) gradient = view(i).detach();
    } else if (gradient.defined() && !gradient.is_sparse()) {
      gradient.copy_(view(i));
    } else {
      gradient = view(i).clone();
    }
  }
}

// After the first backward that was averaged: buckets in the order in which gradients arrive, as
// the leader saw it. Parameters that did not arrive there come last.
void Reducer::learn(const at::Tensor& totals) {
  learned_ = true;
  // (2, parameters): the order, and how often each arrived.
  const auto count = static_cast<int64_t>(parameters_.size());
  const at::Tensor seen = at::empty({2, count}, at::kLong);
  auto order_seen = seen.accessor<int64_t, 2>()[0];
  auto arrivals_seen = seen.accessor<int64_t, 2>()[1];
  for (int64_t i = 0; i < count; ++i) {
    order_seen[i] = static_cast<int64_t>(arrival_order_[static_cast<size_t>(i)]);
    arrivals_seen[i] = states_[static_cast<size_t>(i)].arrivals;
  }
  comm::broadcast(seen, group_, {.root = attendance_.leader, .tag = "order of gradients"}).wait();
  std::vector<size_t> order;
  for (int64_t i = 0; i < count; ++i) {
    State& state = states_[static_cast<size_t>(i)];
    state.expected = shadowing_ ? static_cast<int>(arrivals_seen[i]) : state.arrivals;
    const int64_t index = order_seen[i];
    if (!options_.static_graph || totals.data_ptr<int64_t>()[index] > 0)
      order.push_back(static_cast<size_t>(index));
  }
  order_ = std::move(order);
  const BucketPlan better = plan();
  const bool same =
      std::equal(better.begin(), better.end(), buckets_.begin(), buckets_.end(),
                 [](auto& members, auto& bucket) { return members == bucket.members; });
  if (!same) use_buckets(better);
}

void Reducer::begin_recording(std::function<void(Arrived, bool)> full) {
  const std::lock_guard lock(rounds_.mutex());
  open_round(/*in_backward=*/true);
  num_recorded_ = 0;
  recorded_ = std::move(full);
}

Reducer::Arrived Reducer::end_recording() {
  const std::lock_guard lock(rounds_.mutex());
  recorded_ = {};
  return arrived();
}

Reducer::Arrived Reducer::arrived() {
  const auto first = arrival_order_.begin() + static_cast<std::ptrdiff_t>(std::exchange(
                                                  num_recorded_, arrival_order_.size()));
  return {first, arrival_order_.end()};
}

void Reducer::record(size_t index) {
  stage(index);
  bool is_full = false;
  for (; num_launched_ < buckets_.size() && num_missing_[num_launched_] == 0; ++num_launched_)
    is_full = true;
  if (is_full) recorded_(arrived(), num_launched_ == buckets_.size());
}

void Reducer::begin_repeat() {
  const std::lock_guard lock(rounds_.mutex());
  rounds_.begin_repeated();
}

void Reducer::repeat(const Arrived& arrived) {
  for (const size_t index : arrived) on_gradient(index, /*is_new=*/true);
}

void Reducer::end_repeat() {
  const std::lock_guard lock(rounds_.mutex());
  rounds_.end_repeated();
}

void Reducer::note_accumulated() {
  const std::lock_guard lock(rounds_.mutex());
  for (size_t i = 0; i < parameters_.size(); ++i)
    states_[i].unreduced = states_[i].unreduced || parameters_[i].tensor.grad().defined();
}

void Reducer::reduce_now() {
  const std::lock_guard lock(rounds_.mutex());
  rounds_.run();
}

void Reducer::shadow(const Attendance& attendance) {
  const std::lock_guard lock(rounds_.mutex());
  for (const Parameter& parameter : parameters_) parameter.tensor.mutable_grad().reset();
  sums_.assign(buckets_.size(), {});
  attendance_ = attendance;
  shadowing_ = true;
  const std::unique_ptr<bool, void (*)(bool*)> end(&shadowing_, [](bool* flag) { *flag = false; });
  rounds_.run();
}

std::vector<BucketInfo> Reducer::bucket_infos() const {
  std::vector<BucketInfo> infos;
  for (const Bucket& bucket : buckets_)
    infos.push_back(
        {.bytes = bucket.sparse ? 0 : bucket.flat.nbytes(), .parameters = bucket.names});
  return infos;
}

}  // namespace lockstep::parallel::detail
