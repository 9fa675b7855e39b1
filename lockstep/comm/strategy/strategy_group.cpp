// SPDX-License-Identifier: Apache-2.0
#include "lockstep/comm/strategy/strategy_group.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <utility>

#include "lockstep/comm/control/operation_watchdog.h"
#include "lockstep/comm/reduction_lowering.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::comm::strategy {

using layout::CommStrategy;

struct StrategyGroup::Item {
  Operation operation;
  std::shared_ptr<const void> memory;
  std::function<void()> finish;
  Entry* entry;
  uint64_t sequence;
  std::shared_ptr<Pending> announcement;
  std::shared_ptr<StrategyGroup> group;  // until it is over
  std::atomic<bool> done{false};
  std::exception_ptr error;  // set before done
};

// Outlives the group, whose last operation may be what lets go of it.
struct StrategyGroup::Queue {
  std::mutex mutex;
  std::condition_variable ended;
  std::deque<std::shared_ptr<Item>> items;
  bool running = false;
  std::exception_ptr failure;

  // Returns when it is over, whichever thread has run it.
  void finish(const Item& item) {
    if (item.done.load(std::memory_order_acquire)) return;
    std::unique_lock lock(mutex);
    while (!item.done) {
      if (running) {
        ended.wait(lock, [&] { return item.done || !running; });
      } else {
        run(lock, item);
      }
    }
  }

 private:
  void run(std::unique_lock<std::mutex>& lock, const Item& until) {
    running = true;
    while (!until.done) {
      const std::shared_ptr<Item> item = items.front();
      items.pop_front();
      item->error = failure;
      lock.unlock();
      try {
        if (!item->error) item->group->run(*item);
      } catch (...) {
        item->error = std::current_exception();
      }
      item->finish = nullptr;
      item->memory.reset();
      item->announcement.reset();
      // Before anybody learns of the end: a caller who then drops the group is the last to have it.
      item->group.reset();
      lock.lock();
      if (item->error && !failure) failure = item->error;
      item->done.store(true, std::memory_order_release);
      ended.notify_all();
    }
    running = false;
    ended.notify_all();  // threads that wait for a later one may continue
  }
};

struct StrategyGroup::ItemPending final : Pending {
  ItemPending(std::shared_ptr<Queue> q, std::shared_ptr<Item> i)
      : queue(std::move(q)), item(std::move(i)) {}
  void wait() override {
    queue->finish(*item);
    if (item->error) std::rethrow_exception(item->error);
  }
  bool done() const override { return item->done.load(std::memory_order_acquire); }

  std::shared_ptr<Queue> queue;
  std::shared_ptr<Item> item;
};

StrategyGroup::StrategyGroup(std::shared_ptr<GroupImpl> inner, Table table,
                             std::vector<std::unique_ptr<Algorithm>> algorithms)
    : GroupImpl(inner->membership(), inner->backend()),
      inner_(std::move(inner)),
      table_(std::move(table)),
      queue_(std::make_shared<Queue>()) {
  for (auto& algorithm : algorithms) {
    const std::string name(layout::name_of(algorithm->strategy()));
    entries_.push_back({std::move(algorithm),
                        std::make_unique<detail::OperationTrace>(membership(), "comm", name)});
  }
}

StrategyGroup::Entry* StrategyGroup::choose(const Operation& operation) {
  // Algorithms compute in host memory; what lies on a device is NCCL's.
  if (fabric::is_message(operation.kind) || operation.device >= 0) return nullptr;
  const CommStrategy strategy = table_.choose(
      operation.kind, operation.count * static_cast<int64_t>(size_of(operation.dtype)));
  for (Entry& entry : entries_) {
    if (entry.algorithm->strategy() == strategy)
      return entry.algorithm->covers(operation.kind) ? &entry : nullptr;
  }
  return nullptr;
}

std::shared_ptr<Pending> StrategyGroup::submit(Operation operation,
                                               std::shared_ptr<const void> memory) {
  {
    const std::lock_guard lock(queue_->mutex);
    if (queue_->failure) std::rethrow_exception(queue_->failure);
  }
  Entry* entry = choose(operation);
  if (entry == nullptr) return inner_->submit(std::move(operation), std::move(memory));
  const std::lock_guard submit_lock(submit_mutex_);
  auto item = std::make_shared<Item>();
  item->finish = std::exchange(operation.finish, nullptr);
  item->announcement = inner_->announce(operation);
  item->operation = std::move(operation);
  item->memory = std::move(memory);
  item->entry = entry;
  item->sequence = ++sequence_;
  item->group = shared_from_this();
  {
    const std::lock_guard lock(queue_->mutex);
    queue_->items.push_back(item);
  }
  executor_.post([queue = queue_, item] { queue->finish(*item); });
  return std::make_shared<ItemPending>(queue_, std::move(item));
}

void StrategyGroup::run(Item& item) {
  const auto started = Clock::now();
  if (item.announcement) item.announcement->wait();  // its errors name the operation and the ranks
  CollectiveJob job{item.operation, item.memory, Deadline(item.operation.timeout)};
  const OpKind kind = item.operation.kind;
  if (kind == OpKind::all_reduce || kind == OpKind::reduce_scatter) {
    detail::Adapted form = detail::adapt_reduction(std::move(job.operation), std::move(job.memory),
                                                   membership().rank, membership().size());
    job.operation = std::move(form.operation);
    job.memory = std::move(form.memory);
  }
  try {
    item.entry->algorithm->run(job);
  } catch (...) {
    const std::exception_ptr error = std::current_exception();
    try {
      explain(item, error);
    } catch (...) {
      tell(std::current_exception());
      throw;
    }
  }
  if (job.operation.finish) job.operation.finish();
  if (item.finish) item.finish();
  item.entry->trace->add(item.operation, item.sequence, started, Clock::now());
}

// What went wrong in a group of the algorithm, as a failure of this group's operation. What another
// rank has told is the cause of it.
void StrategyGroup::explain(const Item& item, const std::exception_ptr& error) const {
  detail::throw_if_told(*membership().world->store, membership().name);
  const auto words = [&](const char* what) {
    return format("[{}] rank {} of group '{}': operation {} by {} failed: {}",
                  fabric::name_of(item.operation.kind), membership().rank, membership().name,
                  fabric::describe(item.operation),
                  layout::name_of(item.entry->algorithm->strategy()), what);
  };
  try {
    std::rethrow_exception(error);
  } catch (const PeerLost& lost) {
    throw PeerLost(lost.rank(), words(lost.what()));
  } catch (const DamagedData& damaged) {
    throw DamagedData(damaged.rank(), words(damaged.what()));
  } catch (const TimeoutError& timeout) {
    throw TimeoutError(words(timeout.what()));
  } catch (const std::exception& other) {
    throw CommError(words(other.what()));
  }
}

void StrategyGroup::tell(const std::exception_ptr& error) {
  launch::Store& store = *membership().world->store;
  detail::tell_failure(store, membership().name, membership().rank, error);
  std::string words;
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& what) {
    words = what.what();
  }
  // Ranks in another group of the algorithm wait for a rank that is alive, but will not come.
  const auto end = std::make_exception_ptr(CommError(words));
  for (const Entry& entry : entries_) {
    for (GroupImpl* group : entry.algorithm->groups()) {
      if (group->membership().size() == 1 || group->abort(words)) continue;
      detail::tell_failure(store, group->membership().name, group->membership().rank, end);
    }
  }
  inner_->abort(words);
}

bool StrategyGroup::abort(const std::string& why) {
  const auto error = std::make_exception_ptr(CommError(why));
  {
    const std::lock_guard lock(queue_->mutex);
    if (!queue_->failure) queue_->failure = error;
  }
  tell(error);
  return inner_->abort(why);
}

std::shared_ptr<std::byte> StrategyGroup::allocate(size_t bytes) {
  if (auto memory = inner_->allocate(bytes)) return memory;
  // Not all ranks reach it, but those of this host do.
  for (const Entry& entry : entries_) {
    for (GroupImpl* group : entry.algorithm->groups()) {
      if (auto memory = group->allocate(bytes)) return memory;
    }
  }
  return nullptr;
}

bool StrategyGroup::sums_in_rank_tree() const {
  return inner_->sums_in_rank_tree() &&
         std::all_of(entries_.begin(), entries_.end(), [](const Entry& entry) {
           return entry.algorithm->strategy() == CommStrategy::tree;
         });
}

}  // namespace lockstep::comm::strategy
