// SPDX-License-Identifier: Apache-2.0
// A group some of whose collectives are run by algorithms, the others by its backend.
#pragma once

#include <mutex>

#include "lockstep/comm/op_trace.h"
#include "lockstep/comm/serial_executor.h"
#include "lockstep/comm/strategy/algorithm.h"
#include "lockstep/comm/strategy/table.h"

namespace lockstep::comm::strategy {

// Operations of algorithms run one after the other, by a thread of the group or by a thread that
// waits for one of them, whichever comes first; they keep the group until they are over. They use
// groups of their own, so they are independent of what the backend runs. All are announced to the
// backend's group, in the order in which they were called: it is what compares the calls of
// different ranks.
class StrategyGroup final : public GroupImpl, public std::enable_shared_from_this<StrategyGroup> {
 public:
  StrategyGroup(std::shared_ptr<GroupImpl> inner, Table table,
                std::vector<std::unique_ptr<Algorithm>> algorithms);

  std::shared_ptr<Pending> submit(Operation operation, std::shared_ptr<const void> memory) override;
  std::shared_ptr<Pending> announce(Operation operation) override {
    return inner_->announce(std::move(operation));
  }
  std::shared_ptr<std::byte> allocate(size_t bytes) override;
  int device_for(const at::Tensor& tensor) const override { return inner_->device_for(tensor); }
  std::shared_ptr<std::byte> allocate_on(int device, size_t bytes) override {
    return inner_->allocate_on(device, bytes);
  }
  bool reaches(const void* data, size_t bytes) const override {
    return inner_->reaches(data, bytes);
  }
  fabric::Location locate(const void* data, size_t bytes) const override {
    return inner_->locate(data, bytes);
  }
  std::shared_ptr<const std::byte> reach(int rank,
                                         const fabric::Location& location) const override {
    return inner_->reach(rank, location);
  }
  bool abort(const std::string& why) override;
  bool sums_in_rank_tree() const override;

 private:
  struct Item;
  struct ItemPending;
  struct Queue;
  struct Entry {
    std::unique_ptr<Algorithm> algorithm;
    std::unique_ptr<detail::OperationTrace> trace;
  };

  Entry* choose(const Operation& operation);
  void run(Item& item);
  [[noreturn]] void explain(const Item& item, const std::exception_ptr& error) const;
  // Ends what the other ranks wait for, with this reason.
  void tell(const std::exception_ptr& error);

  std::shared_ptr<GroupImpl> inner_;
  Table table_;
  std::vector<Entry> entries_;

  std::mutex submit_mutex_;  // operations are announced in the order in which they are queued
  uint64_t sequence_ = 0;    // with submit_mutex_
  std::shared_ptr<Queue> queue_;
  detail::SerialExecutor executor_;
};

}  // namespace lockstep::comm::strategy
