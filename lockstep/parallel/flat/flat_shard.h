// SPDX-License-Identifier: Apache-2.0
// This rank's part of a flat: what its optimizer updates, and what its peers gather. Private: not
// installed.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/memory/budget.h"
#include "lockstep/memory/queue.h"
#include "lockstep/parallel/flat/encoded_shard.h"
#include "lockstep/parallel/flat/flat_parameter.h"
#include "lockstep/parallel/flat/stray_writes.h"
#include "lockstep/parallel/intercept/fault_report.h"

namespace lockstep::parallel::detail {

// A tensor that the optimizer updates: the shards of some members, end to end.
struct OptimizedTensor {
  std::string name;
  at::Tensor tensor;
  layout::Range range;        // in the shard
  size_t first = 0, end = 0;  // members
};

class FlatShard {
 public:
  // Takes the values that `value_of` gives for each parameter, which have to be the same on all
  // ranks, and makes the model's parameters views. Where nothing tells the shard from the
  // parameters (FlatPlan::is_own()), they stay the model's own. Collective.
  using ValueOf = std::function<at::Tensor(const optim::NamedParameter&)>;
  FlatShard(FlatParameter& parameter, const ValueOf& value_of);
  ~FlatShard();
  FlatShard(const FlatShard&) = delete;
  FlatShard& operator=(const FlatShard&) = delete;

  // 1-d and untagged: for those who know what they do. Undefined where parameters are the model's
  // own. Where they are encoded, there is memory behind it only after open().
  const at::Tensor& values() const { return values_; }
  // What peers read: the values, a copy of them in the type that travels, or their codes.
  const at::Tensor& sent() const { return sent_; }
  // The line that sent() is a part of, where parameters stay gathered.
  const at::Tensor& whole_line() const { return whole_line_; }
  std::shared_ptr<const FlatNames> names() const { return names_; }
  // Null where the values are kept as they are.
  const EncodedShard* encoded() const { return encoded_.get(); }
  // By LZ4.
  bool is_packed() const { return encoded_ && encoded_->is_lossless(); }
  // Someone is about to read or write the values, past the model; nothing where they are not
  // encoded. settle(): not any more; what was written is encoded. Const as wait_updated() is.
  void open(bool to_write) const;
  void settle() const;
  // For the optimizer. Empty for parameters that are not trained.
  const std::vector<OptimizedTensor>& optimized() const { return optimized_; }
  // This rank's rows of a parameter, tagged; the parameter itself where it is the model's own.
  at::Tensor rows_of(const Member& member) const;
  // All shards end to end, in the type that they have. Collective.
  at::Tensor gathered() const;
  // Bytes that are always there.
  size_t bytes() const;
  // There is another reference to a tensor of parameters() or of rows_of(): an optimizer, a state
  // dict.
  bool is_held() const;
  // The engine goes: the model's parameters keep the values for the next call that shards them.
  // Those of an offloaded model are lost.
  void leave();

  // Shows what was written to those who gather.
  void publish();
  // The model's view takes the place of the values: after someone wrote into it.
  void adopt_shown();
  // The values are being written concurrently with the computation, until the event.
  void set_updating(memory::Event done) { updating_ = std::move(done); }
  const memory::Event& updating() const { return updating_; }
  // Reads and writes of the values from here on come after that.
  void wait_updated() const;
  // Whether something may write; if not, peers may read. check_writes() throws Error, naming the
  // parameter, where something did that might not.
  void allow_writes(bool allowed) { stray_writes_.watch(!allowed); }
  void check_writes() const;

 private:
  at::Tensor memory_for(int64_t count, at::ScalarType dtype);
  void make_encoded();
  void make(const ValueOf& value_of);
  void tag_values();
  void make_optimized();

  FlatParameter& parameter_;
  at::Tensor values_, sent_, whole_line_;
  std::unique_ptr<EncodedShard> encoded_;
  c10::Storage storage_;  // the values' memory with a tag, for all other users
  std::shared_ptr<FlatNames> names_;
  std::vector<OptimizedTensor> optimized_;
  StrayWrites stray_writes_;
  mutable memory::Event updating_;
  std::vector<memory::Budget::Share> shares_;
  FaultReport fault_report_;  // of values that are encoded
};

}  // namespace lockstep::parallel::detail
