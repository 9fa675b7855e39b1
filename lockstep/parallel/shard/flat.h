// SPDX-License-Identifier: Apache-2.0
// Parameters of one kind in one unit, end to end in one line of memory that ranks share out.
//
// A line is gathered from the shards of all ranks before it is used and dropped afterwards; the
// model's own parameters are views of it throughout, and what is behind the views comes and goes.
// Gradients are laid into a second line of the same form, which is reduced into the shards. A line
// over a shard group of one is whole on every rank. Private: not installed.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/comm/peer_memory.h"
#include "lockstep/comm/work.h"
#include "lockstep/layout/flat_layout.h"
#include "lockstep/layout/placement.h"
#include "lockstep/parallel/flat/buffers.h"
#include "lockstep/parallel/flat/copy_thread.h"
#include "lockstep/parallel/flat/seal.h"
#include "lockstep/parallel/gradients/sum_tree.h"
#include "lockstep/parallel/intercept/tag.h"
#include "lockstep/parallel/shard/fully_shard.h"
#include "lockstep/parallel/shard/options.h"
#include "lockstep/parallel/shard/units.h"
#include "lockstep/parallel/tiers/flat_offload.h"

namespace lockstep::parallel {

namespace detail {

// Where one parameter is.
struct Member {
  std::string name;
  at::Tensor tensor;  // the model's own
  layout::Shape shape;
  int64_t offset = 0;    // in the line, in elements
  int64_t row_size = 1;  // elements
  layout::Range rows = {};
  int64_t shard_offset = 0;  // of these rows in this rank's shard, in elements

  int64_t numel() const { return layout::numel_of(shape); }
  int64_t shard_numel() const { return rows.size() * row_size; }
  layout::Shape shard_shape() const;
};

struct FlatPlan {
  std::string unit;
  std::string name;  // of the flat: the unit's, and what tells it from others of the unit
  std::vector<UnitParameter> parameters = {};
  bool trained = true;
  bool resident = false;                      // gathered once a step and never dropped
  bool whole_gradients = false;               // all-reduced instead of reduce-scattered
  comm::Group shard = {};                     // ranks that share the parameters out
  comm::Group reduce = {};                    // the same ranks: what gradients are reduced over
  comm::Group replicas = {};                  // ranks that have the same shard
  at::ScalarType dtype = at::kFloat;          // the shard has
  at::ScalarType gather_dtype = at::kFloat;   // travels
  at::ScalarType compute_dtype = at::kFloat;  // the model sees
  at::ScalarType reduce_dtype = at::kFloat;   // gradients travel
  c10::Device device = at::kCPU;              // the model's
  c10::Device rest_device = at::kCPU;         // the shard's
  std::optional<FlatOffload> offload = std::nullopt;

  // The model's inputs have the type that its parameters had.
  bool casts_inputs() const { return compute_dtype != dtype; }
};

// The name of the unit of tensors that are too small to share out.
inline constexpr const char* kWholeTensors = "whole tensors";

// Where the plan's parameters lie in the line, and what each rank has of it.
layout::FlatLayout lay_out(const FlatPlan& plan);

// What all flats of an engine share.
struct FlatContext {
  const FullyShardOptions* options;
  std::weak_ptr<ShardEngine> engine;
  GatherMemory* gather_memory;
  GradientMemory* gradient_memory;
  CopyThread* copy_thread;
  const bool* is_last_round;  // of a step: its gradients are complete with it
};

class Flat {
 public:
  // Takes the values that `value_of` gives for each parameter, which have to be the same on all
  // ranks. Collective.
  using ValueOf = std::function<at::Tensor(const UnitParameter&)>;
  Flat(FlatPlan plan, FlatContext context, size_t index, const ValueOf& value_of);
  Flat(const Flat&) = delete;
  Flat& operator=(const Flat&) = delete;

  // ---- what it is ----
  const FlatPlan& plan() const { return plan_; }
  const std::vector<Member>& members() const { return members_; }
  const layout::FlatLayout& layout() const { return layout_; }
  // Parameters that the optimizer may update are the model's own: nothing is ever gathered.
  bool is_plain() const { return plain_; }
  // The optimizer has one tensor for all of them.
  bool updates_as_one() const { return !plain_ && !context_.options->use_orig_params; }
  // Throws Error, naming the parameter, where one is no longer the view that it was made.
  void check_members() const;
  // The tensors for the optimizer, with their names. Empty for parameters that are not trained.
  std::vector<UnitParameter> optimized() const;
  layout::Placement placement(const Member& member) const;
  // This rank's rows of a parameter, tagged; the parameter itself where it is plain.
  at::Tensor shard_of(const Member& member) const;

  // ---- parameters ----
  ParameterState state() const { return state_; }
  // Peers' shards are read without their help.
  bool is_one_sided() const { return peers_.has_value(); }
  // To gather it now would take something from other ranks.
  bool gather_communicates() const { return plan_.shard.size() > 1 && !kept_is_valid_; }
  bool reduces_to_shards() const { return scatters(); }
  bool is_live() const { return plain_ || state_ == ParameterState::gathered; }
  // What was gathered is no longer what the shards hold, and goes.
  void make_stale();
  // The shard is about to be written: what is gathered is gathered again before its next use, and
  // autograd refuses graphs that saved what the parameters were.
  void outdate();
  // Peers may read the shard from here to unseal(), and nothing may write it. check_sealed() throws
  // Error, naming the parameter, where something did.
  void seal();
  void check_sealed() const;
  void unseal() { seal_.open(); }
  // The shard is being written beside the computation, until the event.
  void set_updating(memory::Event done) { updating_ = std::move(done); }
  // Whoever reads or writes the shard from here on comes after that.
  void wait_updated() const;
  // Shows what the optimizer has done to the shard to those who gather it.
  void publish();
  // Begins to gather, if that has not begun.
  void prefetch();
  // Gathers, or waits for what was begun. Returns whether anything had to be gathered.
  bool gather();
  void release();
  // The line takes the place of the shard's values: after someone wrote into it.
  void write_back();
  // All shards end to end, in the type that they have. Collective.
  at::Tensor gathered_shards() const;

  // ---- gradients ----
  // A parameter has its gradient.
  void arrive(size_t member, const std::function<bool()>& make_room);
  // A backward begins.
  void begin_round();
  // Every parameter has had a gradient in this backward.
  bool is_complete() const { return num_arrived_ == members_.size(); }
  // Begins to reduce; what is missing counts as zero.
  // The gradients of a micro-batch, or only those that were kept for later.
  struct Leaf {
    std::optional<int64_t> index = {};  // none: the next
    bool is_new = true;
  };
  void launch(const std::function<bool()>& make_room, Leaf leaf);
  bool in_flight() const { return in_flight_; }
  // Whole gradients stay where they are from backward to the next one.
  bool keeps_gradients() const;
  // An offloaded flat whose gradients are this rank's alone.
  bool is_alone() const { return plan_.offload && gradient_group().size() == 1; }
  // Waits for that, and gives the line's memory back.
  void wait_reduced();
  // Leaves the gradients where the optimizer finds them: of those members for which some rank had
  // one.
  void settle(std::span<const int64_t> num_ranks);
  // Ends a micro-batch that is not reduced.
  void keep_for_later(const std::function<bool()>& make_room, std::optional<int64_t> micro_batch);
  // Every parameter has its gradient of a micro-batch that is not reduced: what is offloaded
  // leaves.
  void put_aside();
  void abandon();
  // What the shards have of a parameter's gradient becomes zero.
  void zero_gradient(size_t member);
  // What a round that was not reduced left of this rank's gradients.
  bool has_unreduced(size_t member) const;
  // The optimizer's gradients that `view` stands for are set to zero.
  void zero_unreduced(const at::Tensor& view);
  // Before the next gradient of a parameter is accumulated.
  void before_accumulation(const Member& member) const;

  // What the optimizer needs of an offloaded flat.
  struct OffloadedTensor {
    std::string name;
    at::Tensor optimized;  // as optimized() gives it
    at::Tensor values;     // the same memory, 1-d, for whoever moves it
    const StatePlan* state;
  };
  std::vector<OffloadedTensor> offloaded() const;
  // Gathering would not go past a budget.
  bool has_room() const;
  // Gradients that were sent to the host are there.
  void wait_gradients();
  const memory::Event& gradients_moved() const { return gradients_moved_; }
  bool is_on_host(const at::Tensor& gradient) const;
  // Gradients go where an update that ends with the event has read them.
  void let_go_of_gradients(const memory::Event& read);

  // Bytes that are always there.
  size_t parameter_bytes() const;
  size_t gradient_bytes() const { return shard_gradient_.defined() ? shard_gradient_.nbytes() : 0; }

 private:
  void make_members();
  void make_shard(const ValueOf& value_of);
  void tag_shard();
  void make_optimized();
  void attach_parameters();
  Tag tag(Tag::Kind kind, std::shared_ptr<void> memory) const;
  void point_to(const at::Tensor& line);
  void point_nowhere();
  void begin(bool beside_computation);
  void wait_gathered();
  at::Tensor buffer(at::ScalarType dtype, c10::Device device) const;
  at::Tensor shared_memory(int64_t count, at::ScalarType dtype);
  bool comes_from_host() const;
  void fetch();
  // Of what peers have; small enough that two threads can share the work.
  struct Piece {
    int rank;
    int64_t source;  // elements into what that rank sends
    int64_t target;  // elements into the line
    int64_t count;
  };
  void make_pieces();
  void copy_piece(const at::Tensor& line, const Piece& piece) const;
  // The same by torch's threads: for the thread that computes.
  void copy_piece_by_all(const at::Tensor& line, const Piece& piece) const;
  void finish_pulling(const at::Tensor& line);
  layout::Range block() const;
  bool scatters() const { return plan_.shard.size() > 1 && !plan_.whole_gradients; }
  const comm::Group& gradient_group() const;
  at::Tensor gradient_view(const Member& member) const;
  void open_gradients(const std::function<bool()>& make_room);
  void close_gradients(const memory::Event& unused = {});
  bool consumes_gradients() const;
  void bring_back();
  void send_to_host(const at::Tensor& gradient, const at::Tensor& arrived, bool adds);
  void notice_zeroed();
  void drop_unreduced(size_t member);
  void fill_gaps();
  void show_unreduced();
  void hide_unreduced();
  bool accumulates() const;
  void make_shard_gradient();
  at::ScalarType gradient_dtype() const;  // that the optimizer sees
  void settle_shards(std::span<const int64_t> num_ranks);
  void settle_parameters(std::span<const int64_t> num_ranks);

  FlatPlan plan_;
  FlatContext context_;
  size_t index_;
  std::vector<Member> members_;
  layout::FlatLayout layout_;
  std::shared_ptr<FlatNames> names_;
  bool plain_ = false;
  bool in_place_ = false;  // what the model sees is the shard, which an optimizer may be updating

  at::Tensor shard_;  // 1-d, and untagged: for the engine's own use
  at::Tensor sent_;   // what peers read: the shard, or a copy of it in the type that travels
  c10::Storage shard_storage_;  // the shard's memory with a tag, for all other users
  std::shared_ptr<FlatNames> shard_names_;
  Seal seal_;
  // What the optimizer updates: tagged views of the shard. Of the whole, or one for each member.
  struct Optimized {
    std::string name;
    at::Tensor tensor;
    layout::Range range;        // in the shard
    size_t first = 0, end = 0;  // members
    at::Tensor unreduced = {};  // stands for its gradient
    // Of its gradient at the end of a round that was not reduced, to see what the user does to it.
    std::optional<int64_t> version = {};
  };
  std::vector<Optimized> optimized_;
  std::optional<comm::PeerMemory> peers_;
  std::vector<Piece> pieces_;
  c10::Storage storage_;  // behind the model's parameters
  memory::AddressRange nowhere_;
  ParameterState state_ = ParameterState::sharded;
  bool stale_ = true;
  at::Tensor line_;      // while it is live or on its way
  at::Tensor arriving_;  // where it is gathered, if that is not where it is used
  at::Tensor kept_;      // offload_to_cpu
  bool kept_is_valid_ = false;
  comm::Work gathering_;
  CopyThread::Job pulling_;
  memory::Event fetched_;           // from the host
  mutable memory::Event updating_;  // the shard
  memory::Event gradients_moved_;   // to the host
  at::Tensor aside_;                // the line, on the host between micro-batches
  std::vector<bool> aside_filled_;  // what it has; empty: nothing
  std::vector<memory::Budget::Share> shares_;

  at::Tensor gradients_;       // the line, while there is one
  at::Tensor gradient_block_;  // the memory that it is in
  std::vector<bool> filled_;   // members with a gradient in the line
  std::vector<bool> arrived_;  // in this backward
  size_t num_arrived_ = 0;
  bool in_flight_ = false;
  bool settled_ = true;
  at::Tensor reduced_;         // this rank's block, as it comes from the group
  at::Tensor shard_gradient_;  // kept from step to step
  comm::Work reducing_;
  SumTree sum_;
  std::vector<at::Tensor> stand_ins_;  // for gradients of the model's parameters
  // Of the gradients that the model's parameters were left with, to see what the user does to them;
  // none where they were left without.
  std::vector<std::optional<int64_t>> versions_;
};

}  // namespace detail
}  // namespace lockstep::parallel
