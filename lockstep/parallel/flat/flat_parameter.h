// SPDX-License-Identifier: Apache-2.0
// Where the parameters of a flat lie in its line, and what the model sees of them.
//
// A line is gathered from the shards of all ranks before it is used and dropped afterwards; the
// model's own parameters are views of it throughout, and what is behind the views comes and goes.
// Private: not installed.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "lockstep/layout/placement.h"
#include "lockstep/parallel/flat/flat_plan.h"
#include "lockstep/parallel/intercept/tag.h"

namespace lockstep::parallel::detail {

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

// This rank's part of a flat whose engine has gone. The model's parameters keep it, so that the
// engine of a larger model can take the values over.
struct LeftShard {
  at::Tensor values;
  c10::Storage tagged;          // the same memory; null where there is nothing in it
  std::vector<int64_t> counts;  // of all ranks' parts; one, if every rank has all
};

class FlatParameter {
 public:
  // `index`: the flat's place in the engine, which tags lead operators to.
  FlatParameter(FlatPlan plan, std::weak_ptr<ShardEngine> engine, size_t index);
  FlatParameter(const FlatParameter&) = delete;
  FlatParameter& operator=(const FlatParameter&) = delete;

  const FlatPlan& plan() const { return plan_; }
  // Of an offloaded model, whose places may be decided again.
  FlatOffload& offload() { return *plan_.offload; }
  size_t index() const { return index_; }
  const std::vector<Member>& members() const { return members_; }
  const layout::FlatLayout& layout() const { return layout_; }
  // This rank's part of the line.
  layout::Range block() const { return layout_.blocks[static_cast<size_t>(plan_.shard.rank())]; }
  layout::Placement placement(const Member& member) const;

  // The model's parameters become views, with nothing behind them. Never called for those that stay
  // the model's own.
  void make_views();
  // What is behind the views: a line, or nothing.
  void show(const at::Tensor& line);
  void hide();
  const at::Tensor& shown() const { return line_; }
  // The engine goes; what is behind the views stays, and the views lead to what is left.
  void leave(std::shared_ptr<const LeftShard> left);
  // Values are about to change: autograd refuses graphs that saved what the parameters were.
  void outdate() const;
  // Throws Error, naming the parameter, where one is no longer the view that it was made.
  void check_views() const;

  // Storage with nothing behind it, for tensors that stand for what is elsewhere: on the CPU,
  // addresses that fault at a use and say why. `names`: of the parameters in it; null: those of the
  // line.
  c10::Storage empty_storage(Tag::Kind kind, size_t bytes, c10::Device device,
                             std::shared_ptr<const FlatNames> names = nullptr) const;
  Tag tag(Tag::Kind kind, std::shared_ptr<void> memory) const;

 private:
  FlatPlan plan_;
  std::weak_ptr<ShardEngine> engine_;
  size_t index_;
  std::vector<Member> members_;
  layout::FlatLayout layout_;
  std::shared_ptr<FlatNames> names_;
  c10::Storage storage_;  // behind the views; null: the parameters are the model's own
  struct Nowhere;
  std::shared_ptr<Nowhere> make_nowhere(Tag::Kind kind, size_t bytes,
                                        std::shared_ptr<const FlatNames> names) const;
  void* nowhere_data() const;
  std::shared_ptr<Nowhere> nowhere_;  // of the views; null on a device
  at::Tensor line_;
};

}  // namespace lockstep::parallel::detail
