// SPDX-License-Identifier: Apache-2.0
// Averages gradients over a group while backward produces them.
//
// A round is one backward pass. Gradients arrive in it one by one; each is moved into its bucket,
// and a full bucket is reduced at once, in bucket order, overlapped with the rest of backward. A
// callback at the end of backward reduces what is left and waits. Last, all ranks compare which
// parameters had gradients, so that an error, like a decision, is the same everywhere.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/collectives.h"
#include "lockstep/parallel/data/bucket.h"
#include "lockstep/parallel/data/ddp.h"
#include "lockstep/parallel/data/uneven_inputs.h"
#include "lockstep/parallel/data/usage_check.h"
#include "lockstep/parallel/gradients/backward_rounds.h"
#include "lockstep/parallel/gradients/sum_tree.h"

namespace lockstep::parallel::detail {

// What is likely wrong where a rank waits in vain.
inline constexpr const char* kUnevenInputs =
    "where ranks have different numbers of batches, set uneven_inputs, and call join() on a rank "
    "that has no more";
inline constexpr const char* kJoin = "a rank that has no more batches must call join()";

class Reducer final : public BackwardRounds::Listener,
                      public std::enable_shared_from_this<Reducer> {
 public:
  // Collective.
  Reducer(std::vector<Parameter> parameters, std::vector<Parameter> frozen, comm::Group group,
          const DdpOptions& options);
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  // Begins to listen to the parameters' gradients, when a shared_ptr owns this; again where they
  // were moved to another device.
  void start();
  // ConfigError where a backward is in progress.
  void check_between_rounds(const char* operation);
  // New buckets, of the sizes in the options and on the parameters' devices. Gradients that were
  // accumulated move along. Collective.
  void lay_out_again();
  // Forgets what was accumulated without the other ranks; the caller clears the gradients.
  void drop_accumulated();
  void set_syncing(bool syncing) { syncing_ = syncing; }
  void set_micro_batch(std::optional<int64_t> index) { micro_batch_ = index; }
  // In backward: a round begins, if none is open; its end is queued on the graph that runs
  // now.
  void begin_backward();
  // Says what this rank is about to do, where ranks may run out of data. Collective.
  Attendance take_part(Activity activity);
  // A backward that is recorded as graphs: until end_recording() gradients are put where they are
  // reduced from, and nothing is reduced. `full` is called when the next bucket in order is
  // complete, with the parameters whose gradients came since it was last called; `last`: no bucket
  // is left.
  using Arrived = std::vector<size_t>;
  void begin_recording(std::function<void(Arrived arrived, bool last)> full);
  Arrived end_recording();  // those that came since `full` was last called
  // Such a backward again: repeat() behind each graph reduces the buckets that are complete.
  void begin_repeat();
  void repeat(const Arrived& arrived);
  void end_repeat();
  // Behind a backward without reduction that was repeated.
  void note_accumulated();
  // A round outside backward, over the gradients as they are.
  void reduce_now();
  // A round of the other ranks, to which this one adds nothing.
  void shadow(const Attendance& attendance);

  // The lowest rank that took part when one last did.
  int leader() const { return leader_; }
  std::vector<BucketInfo> bucket_infos() const;

 private:
  // Per parameter.
  struct State {
    size_t bucket = 0, place = 0;
    bool in_bucket = false;  // not, if no step uses it (static_graph)
    bool unreduced = false;  // has a gradient that other ranks have not seen
    bool staged = false;     // in this round
    bool late = false;       // came after its bucket was sent
    int arrivals = 0;        // in this round
    int expected = 1;        // static_graph: arrivals in each round
  };

  void on_gradient(size_t index, bool is_new) override;
  bool open_round(bool in_backward) override;
  void close_round() override;
  void abandon_round() override;
  void accumulate_round();
  void average_round();
  void stage(size_t index);
  void record(size_t index);
  Arrived arrived();
  void launch_full_buckets();
  void launch(size_t position);
  const Parameter* thawed() const;
  at::Tensor flags() const;
  void check_flags(const at::Tensor& totals, const at::Tensor& mine) const;
  void finalize_gradients(const at::Tensor& totals);
  void learn(const at::Tensor& totals);
  BucketPlan plan() const;
  void use_buckets(const BucketPlan& plan);
  std::vector<SumTree> sums_for(const std::vector<Bucket>& buckets) const;
  at::Tensor& view(size_t index);
  bool overlaps() const;

  std::vector<Parameter> parameters_;
  const std::vector<Parameter> frozen_;  // not trained
  comm::Group group_;
  const DdpOptions& options_;
  std::vector<State> states_;
  std::vector<size_t> order_;  // in which gradients arrive
  std::vector<Bucket> buckets_;
  std::vector<SumTree> sums_;  // per bucket; reproducible mode

  BackwardRounds rounds_;
  bool syncing_ = true;
  std::optional<int64_t> micro_batch_;  // whose gradients come; none: the next one's
  bool learned_ = false;                // the first averaged backward is over
  bool in_backward_ = false;            // the round is a backward, not sync_gradients
  bool shadowing_ = false;
  bool round_syncs_ = true;
  Attendance attendance_;
  int leader_ = 0;
  size_t num_launched_ = 0;
  std::vector<size_t> num_missing_;  // per bucket
  std::vector<std::function<void()>> completions_;
  std::vector<size_t> arrival_order_;
  std::function<void(Arrived, bool)> recorded_;  // while a backward is recorded
  size_t num_recorded_ = 0;                      // of arrival_order_
};

}  // namespace lockstep::parallel::detail
