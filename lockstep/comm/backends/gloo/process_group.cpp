// SPDX-License-Identifier: Apache-2.0
// c10d's engines run operations on threads of their own and call back. Gloo has no uneven
// all_gather: each block is broadcast. reduce_scatter is an all_to_all and a sum in fixed order.
#include "lockstep/comm/backends/gloo/process_group.h"

#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <mutex>
#include <thread>
#include <utility>

#include "lockstep/comm/backends/gloo/no_sigpipe.h"
#include "lockstep/comm/backends/gloo/tags.h"
#include "lockstep/comm/control/call_consistency.h"
#include "lockstep/comm/control/watched_operation.h"
#include "lockstep/comm/reduction_lowering.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/fabric/agreement.h"
#include "lockstep/fabric/reduce.h"
#include "lockstep/memory/tensor_bytes.h"

namespace lockstep::comm::gloo {
namespace {

using detail::Adapted;
using detail::Completion;
using fabric::Operation;
using fabric::OpKind;
using WorkHandle = c10::intrusive_ptr<c10d::Work>;

at::Tensor bytes_tensor(std::span<const std::byte> bytes) {
  // from_blob refuses null; an empty message needs some address.
  static std::byte nothing;
  return at::from_blob(bytes.empty() ? &nothing : const_cast<std::byte*>(bytes.data()),
                       {static_cast<int64_t>(bytes.size())}, at::kByte);
}

at::Tensor typed_tensor(std::span<std::byte> bytes, DType dtype) {
  return at::from_blob(bytes.data(), {static_cast<int64_t>(bytes.size() / size_of(dtype))},
                       at::TensorOptions().dtype(memory::to_scalar_type(dtype)));
}

c10d::ReduceOp::RedOpType to_c10d(fabric::ReduceOp op) {
  switch (op) {
    case fabric::ReduceOp::product:
      return c10d::ReduceOp::PRODUCT;
    case fabric::ReduceOp::min:
      return c10d::ReduceOp::MIN;
    case fabric::ReduceOp::max:
      return c10d::ReduceOp::MAX;
    default:
      return c10d::ReduceOp::SUM;
  }
}

class EngineGroup final : public detail::GroupImpl,
                          public std::enable_shared_from_this<EngineGroup> {
 public:
  EngineGroup(detail::Membership membership, std::string backend, c10::intrusive_ptr<Engine> engine,
              TagSetter set_tag)
      : GroupImpl(std::move(membership), std::move(backend)),
        watchdog_(this->membership()),
        trace_(this->membership()),
        size_(this->membership().size()),
        rank_(this->membership().rank),
        consistency_(this->membership(), watchdog_),
        set_tag_(std::move(set_tag)),
        group_(std::move(engine)) {}

  ~EngineGroup() override {
    const NoSigpipe no_signal;
    // Gloo's own destructor waits for what runs, in a broken group until its timeout: not here.
    if (broken_ || *in_flight_ > 0)
      std::thread([group = std::move(group_)]() mutable { group.reset(); }).detach();
    group_.reset();
  }

  std::shared_ptr<detail::Pending> submit(Operation operation,
                                          std::shared_ptr<const void> memory) override;
  // Those that run cannot be ended, but none begins.
  bool abort(const std::string& why) override {
    consistency_.abort(why);
    return false;
  }
  std::shared_ptr<std::byte> allocate(size_t) override { return nullptr; }
  bool reaches(const void*, size_t) const override { return false; }
  std::shared_ptr<detail::Pending> announce(Operation operation) override;

 private:
  class Announced;
  struct Started {
    std::vector<WorkHandle> works;
    std::shared_ptr<const void> memory;
    std::function<void()> finish;
  };

  // Gives the operation to the engine; what comes of it, an error too, goes to `completion`.
  void begin(const Operation& operation, uint64_t sequence, std::shared_ptr<const void> memory,
             const std::shared_ptr<Completion>& completion);
  // Whether the engine may have it before ranks have agreed: where it would match no other, blocks
  // of all_to_all being what the tag does not tell, and in the order of the calls: an engine with
  // few threads runs it in that order.
  bool begins_at_once(const Operation& operation) const {
    return set_tag_ && consistency_.has_board() && operation.kind != OpKind::all_to_all &&
           num_held_back_ == 0;
  }
  // How ranks of several hosts gather what they call.
  detail::CallConsistency::Exchange exchange_for(const Operation& operation, uint64_t sequence);

  Started start(const Operation& operation, std::shared_ptr<const void> memory);
  Started start_reduce_scatter(const Operation& operation, std::shared_ptr<const void> memory);
  Started start_all_to_all(const Operation& operation, std::shared_ptr<const void> memory);
  Started start_all_gather(const Operation& operation, std::shared_ptr<const void> memory);
  int next_tag(const Operation& operation);
  void begin_message(const Operation& operation, std::shared_ptr<const void> memory, int tag,
                     bool header, const std::shared_ptr<Completion>& completion);
  std::shared_ptr<detail::Pending> submit_message(Operation operation, uint64_t sequence,
                                                  std::shared_ptr<const void> memory);
  std::shared_ptr<detail::WatchedPending> pending(Operation operation, uint64_t sequence,
                                                  Clock::time_point started,
                                                  std::shared_ptr<Completion> completion,
                                                  std::shared_ptr<const void> memory,
                                                  std::shared_ptr<detail::Pending> agreed) {
    return std::make_shared<detail::WatchedPending>(
        detail::WatchedPending::Owner{shared_from_this(), watchdog_, trace_,
                                      [this](const std::string& why) {
                                        broken_ = true;
                                        consistency_.abort(why);
                                      }},
        std::move(operation), sequence, started, std::move(completion), std::move(memory),
        std::move(agreed));
  }
  // Lets the completion have a part for each of the works.
  void follow(const std::vector<WorkHandle>& works, const std::shared_ptr<const void>& memory,
              const std::shared_ptr<Completion>& completion);
  milliseconds engine_timeout(const Operation& operation) const {
    return operation.timeout + milliseconds{500};
  }

  detail::OperationWatchdog watchdog_;
  detail::OperationTrace trace_;
  int size_, rank_;
  std::atomic<bool> broken_{false};
  const std::shared_ptr<std::atomic<int>> in_flight_ = std::make_shared<std::atomic<int>>(0);
  std::mutex mutex_;
  std::map<std::pair<OpKind, int>, uint32_t> message_numbers_;
  detail::CallConsistency consistency_;
  std::atomic<int> num_held_back_{0};
  const TagSetter set_tag_;
  c10::intrusive_ptr<Engine> group_;
};

// Until it has been run by other means.
class EngineGroup::Announced final : public detail::Pending {
 public:
  Announced(std::shared_ptr<EngineGroup> group, std::shared_ptr<Pending> agreed,
            std::shared_ptr<Pending> running)
      : group_(std::move(group)), agreed_(std::move(agreed)), running_(std::move(running)) {}
  void wait() override {
    if (agreed_) agreed_->wait();
  }
  bool done() const override { return !agreed_ || agreed_->done(); }

 private:
  std::shared_ptr<EngineGroup> group_;
  std::shared_ptr<Pending> agreed_, running_;
};

void EngineGroup::follow(const std::vector<WorkHandle>& works,
                         const std::shared_ptr<const void>& memory,
                         const std::shared_ptr<Completion>& completion) {
  for (const WorkHandle& work : works) {
    ++*in_flight_;
    // The callback holds the work and its memory: they must live until Gloo has let go of them,
    // whether or not anybody waits.
    work->getFuture()->addCallback(
        [completion, work, memory, in_flight = in_flight_](c10::ivalue::Future& future) {
          --*in_flight;
          completion->part_done(future.hasError() ? future.exception_ptr() : nullptr);
        });
  }
}

detail::CallConsistency::Exchange EngineGroup::exchange_for(const Operation& operation,
                                                            uint64_t sequence) {
  return [self = shared_from_this(), operation,
          sequence](const std::shared_ptr<detail::OperationWatchdog::Records>& records) {
    const NoSigpipe no_signal;
    const size_t size = records->mine.size();
    std::vector<at::Tensor> inputs{bytes_tensor(records->mine)};
    std::vector<std::vector<at::Tensor>> outputs(1);
    for (size_t at = 0; at < records->all.size(); at += size)
      outputs[0].push_back(bytes_tensor(std::span(records->all).subspan(at, size)));
    const auto completion = std::make_shared<Completion>(1);
    WorkHandle work;
    {
      const std::lock_guard lock(self->mutex_);
      // Whatever the operation is, all ranks have this one.
      if (self->set_tag_) self->set_tag_(static_cast<uint32_t>(sequence & 0x3ff) << 22 | 0xff);
      work = self->group_->allgather(outputs, inputs);
    }
    self->follow({work}, records, completion);
    self->pending(operation, sequence, Clock::now(), completion, records, nullptr)->wait();
  };
}

std::shared_ptr<detail::Pending> EngineGroup::announce(Operation operation) {
  if (fabric::is_message(operation.kind)) return nullptr;
  const uint64_t sequence = watchdog_.begin(operation);
  auto agreed =
      consistency_.post(operation, sequence, std::exchange(operation.finish, nullptr),
                        consistency_.exchanges() ? exchange_for(operation, sequence) : nullptr);
  return std::make_shared<Announced>(shared_from_this(), std::move(agreed),
                                     watchdog_.announce(operation, sequence));
}

std::shared_ptr<detail::Pending> EngineGroup::submit(Operation operation,
                                                     std::shared_ptr<const void> memory) {
  const uint64_t sequence = watchdog_.begin(operation);
  if (fabric::is_message(operation.kind))
    return submit_message(std::move(operation), sequence, std::move(memory));
  const auto started = Clock::now();
  auto completion = std::make_shared<Completion>(1, std::exchange(operation.finish, nullptr));
  std::shared_ptr<detail::Pending> agreed;
  if (begins_at_once(operation)) {
    operation.unhurried = true;
    agreed = consistency_.post(operation, sequence, nullptr, nullptr);
    begin(operation, sequence, memory, completion);
  } else {
    ++num_held_back_;
    agreed = consistency_.post(
        operation, sequence,
        [self = shared_from_this(), operation, sequence, memory, completion] {
          self->begin(operation, sequence, memory, completion);
          --self->num_held_back_;
        },
        consistency_.exchanges() ? exchange_for(operation, sequence) : nullptr);
  }
  return pending(std::move(operation), sequence, started, std::move(completion), std::move(memory),
                 std::move(agreed));
}

void EngineGroup::begin(const Operation& operation, uint64_t sequence,
                        std::shared_ptr<const void> memory,
                        const std::shared_ptr<Completion>& completion) {
  const NoSigpipe no_signal;
  std::exception_ptr error;
  try {
    const std::lock_guard lock(mutex_);  // of a tag and the call that takes it
    if (set_tag_) set_tag_(tag_of(operation, sequence));
    Started begun = start(operation, std::move(memory));
    completion->expect(begun.works.size(), std::move(begun.finish));
    follow(begun.works, begun.memory, completion);
  } catch (const c10::Error& refused) {
    error = std::make_exception_ptr(
        CommError(format("{} refused it: {}", backend(), refused.what_without_backtrace())));
  } catch (...) {
    error = std::current_exception();
  }
  completion->part_done(error);
}

EngineGroup::Started EngineGroup::start(const Operation& operation,
                                        std::shared_ptr<const void> memory) {
  const milliseconds timeout = engine_timeout(operation);
  switch (operation.kind) {
    case OpKind::all_reduce:
    case OpKind::reduce: {
      if (operation.output.empty()) return {{}, std::move(memory), {}};
      Adapted adapted = detail::adapt_reduction(operation, std::move(memory), rank_, size_);
      std::vector<at::Tensor> tensors{
          typed_tensor(adapted.operation.output, adapted.operation.dtype)};
      if (operation.kind == OpKind::all_reduce) {
        c10d::AllreduceOptions options;
        options.reduceOp = to_c10d(adapted.operation.reduce);
        options.timeout = timeout;
        return {{group_->allreduce(tensors, options)},
                std::move(adapted.memory),
                std::move(adapted.operation.finish)};
      }
      // Gloo uses the tensors of the others as work space; ours stay as they are.
      if (rank_ != operation.root) tensors[0] = tensors[0].clone();
      c10d::ReduceOptions options;
      options.reduceOp = to_c10d(adapted.operation.reduce);
      options.rootRank = operation.root;
      options.timeout = timeout;
      return {{group_->reduce(tensors, options)},
              std::move(adapted.memory),
              std::move(adapted.operation.finish)};
    }
    case OpKind::broadcast: {
      if (operation.output.empty()) return {{}, std::move(memory), {}};
      std::vector<at::Tensor> tensors{bytes_tensor(operation.output)};
      c10d::BroadcastOptions options;
      options.rootRank = operation.root;
      options.timeout = timeout;
      return {{group_->broadcast(tensors, options)}, std::move(memory), {}};
    }
    case OpKind::all_gather:
      return start_all_gather(operation, std::move(memory));
    case OpKind::reduce_scatter:
      return start_reduce_scatter(operation, std::move(memory));
    case OpKind::all_to_all:
      return start_all_to_all(operation, std::move(memory));
    case OpKind::gather:
    case OpKind::scatter: {
      if (operation.count == 0) return {{}, std::move(memory), {}};
      const bool gathers = operation.kind == OpKind::gather;
      const size_t block = gathers ? operation.input.size() : operation.output.size();
      std::vector<std::vector<at::Tensor>> all;
      std::vector<at::Tensor> mine{bytes_tensor(gathers ? operation.input : operation.output)};
      if (rank_ == operation.root) {
        const std::span<const std::byte> whole =
            gathers ? std::span<const std::byte>(operation.output) : operation.input;
        all.emplace_back();
        for (int rank = 0; rank < size_; ++rank)
          all[0].push_back(bytes_tensor(whole.subspan(static_cast<size_t>(rank) * block, block)));
      }
      if (gathers) {
        c10d::GatherOptions options;
        options.rootRank = operation.root;
        options.timeout = timeout;
        return {{group_->gather(all, mine, options)}, std::move(memory), {}};
      }
      c10d::ScatterOptions options;
      options.rootRank = operation.root;
      options.timeout = timeout;
      return {{group_->scatter(mine, all, options)}, std::move(memory), {}};
    }
    default: {
      c10d::BarrierOptions options;
      options.timeout = timeout;
      return {{group_->barrier(options)}, std::move(memory), {}};
    }
  }
}

EngineGroup::Started EngineGroup::start_all_gather(const Operation& operation,
                                                   std::shared_ptr<const void> memory) {
  const size_t width = size_of(operation.dtype);
  std::vector<std::span<std::byte>> blocks;
  size_t at = 0;
  for (const int64_t count : operation.recv_counts) {
    blocks.push_back(operation.output.subspan(at, static_cast<size_t>(count) * width));
    at += blocks.back().size();
  }
  const bool even = std::all_of(blocks.begin(), blocks.end(), [&](const auto& block) {
    return block.size() == blocks[0].size();
  });
  if (even) {
    if (blocks[0].empty()) return {{}, std::move(memory), {}};
    std::vector<std::vector<at::Tensor>> outputs(1);
    for (const auto& block : blocks) outputs[0].push_back(bytes_tensor(block));
    std::vector<at::Tensor> inputs{bytes_tensor(operation.input)};
    c10d::AllgatherOptions options;
    options.timeout = engine_timeout(operation);
    return {{group_->allgather(outputs, inputs, options)}, std::move(memory), {}};
  }
  auto& mine = blocks[static_cast<size_t>(rank_)];
  if (mine.data() != operation.input.data())
    std::copy(operation.input.begin(), operation.input.end(), mine.begin());
  Started started{{}, std::move(memory), {}};
  for (int rank = 0; rank < size_; ++rank) {
    if (blocks[static_cast<size_t>(rank)].empty()) continue;
    std::vector<at::Tensor> tensors{bytes_tensor(blocks[static_cast<size_t>(rank)])};
    c10d::BroadcastOptions options;
    options.rootRank = rank;
    options.timeout = engine_timeout(operation);
    started.works.push_back(group_->broadcast(tensors, options));
  }
  return started;
}

EngineGroup::Started EngineGroup::start_all_to_all(const Operation& operation,
                                                   std::shared_ptr<const void> memory) {
  const auto bytes = [&](std::vector<int64_t> counts) {
    for (auto& count : counts) count *= static_cast<int64_t>(size_of(operation.dtype));
    return counts;
  };
  at::Tensor output = bytes_tensor(operation.output), input = bytes_tensor(operation.input);
  std::vector<int64_t> receives = bytes(operation.recv_counts),
                       sends = bytes(operation.send_counts);
  c10d::AllToAllOptions options;
  options.timeout = engine_timeout(operation);
  return {{group_->alltoall_base(output, input, receives, sends, options)}, std::move(memory), {}};
}

EngineGroup::Started EngineGroup::start_reduce_scatter(const Operation& operation,
                                                       std::shared_ptr<const void> memory) {
  if (operation.input.empty()) return {{}, std::move(memory), {}};
  const int64_t mine = operation.send_counts[static_cast<size_t>(rank_)];
  const size_t block = static_cast<size_t>(mine) * size_of(operation.dtype);
  auto parts = std::make_shared<std::vector<std::byte>>(block * static_cast<size_t>(size_));
  Operation exchange = operation;
  exchange.kind = OpKind::all_to_all;
  exchange.output = *parts;
  exchange.recv_counts = std::vector<int64_t>(static_cast<size_t>(size_), mine);
  // Gloo writes to them as long as it likes, whatever becomes of the operation.
  memory = std::make_shared<std::pair<std::shared_ptr<const void>, std::shared_ptr<const void>>>(
      std::move(memory), parts);
  Started started = start_all_to_all(exchange, std::move(memory));
  started.finish = [parts, block, mine, size = size_, output = operation.output,
                    dtype = operation.dtype, reduce = operation.reduce] {
    std::vector<const std::byte*> inputs;
    for (int rank = 0; rank < size; ++rank)
      inputs.push_back(parts->data() + static_cast<size_t>(rank) * block);
    std::byte* target = output.data();
    fabric::reduce(dtype, reduce, std::span(&target, 1), inputs, static_cast<size_t>(mine));
  };
  return started;
}

int EngineGroup::next_tag(const Operation& operation) {
  uint32_t number = 0;
  {
    const std::lock_guard lock(mutex_);
    number = message_numbers_[{operation.kind, operation.root}]++ % (1 << 15);
  }
  if (!consistency_.has_board()) return static_cast<int>(number << 15);
  Operation either = operation;  // a send and its recv
  either.kind = OpKind::send;
  either.root = 0;
  return static_cast<int>(number << 15 | fingerprint(either) << 1);
}

// A sender does not wait for its receiver. Where there is a board, a recv never meets a send that
// is not its own, and hears of that from the board; else a header goes before the data.
std::shared_ptr<detail::Pending> EngineGroup::submit_message(Operation operation, uint64_t sequence,
                                                             std::shared_ptr<const void> memory) {
  const auto started = Clock::now();
  auto completion = std::make_shared<Completion>(1, std::exchange(operation.finish, nullptr));
  const bool header = membership().world->check && !consistency_.has_board();
  begin_message(operation, memory, next_tag(operation), header, completion);
  auto agreed = consistency_.has_board() ? consistency_.post_message(operation) : nullptr;
  return pending(std::move(operation), sequence, started, std::move(completion), std::move(memory),
                 std::move(agreed));
}

// Every message has tags of its own, so that a header can be looked at before the data is asked
// for. The works of sends and receives can only be waited for, so a thread does that.
void EngineGroup::begin_message(const Operation& operation, std::shared_ptr<const void> memory,
                                int tag, bool with_header,
                                const std::shared_ptr<Completion>& completion) {
  const NoSigpipe no_signal;
  const bool sends = operation.kind == OpKind::send;
  const int peer = operation.root;
  auto header = std::make_shared<fabric::Signature>(fabric::signature_of(operation));
  const auto transfer = [this, sends, peer](at::Tensor tensor, int with_tag) {
    std::vector<at::Tensor> tensors{std::move(tensor)};
    return sends ? group_->send(tensors, peer, with_tag) : group_->recv(tensors, peer, with_tag);
  };
  const auto header_bytes = std::as_writable_bytes(std::span(header.get(), 1));
  WorkHandle header_work, data_work;
  const fabric::Signature expected = *header;
  try {
    if (with_header) header_work = transfer(bytes_tensor(header_bytes), tag);
    if (sends || !with_header)
      data_work = transfer(
          bytes_tensor(sends ? operation.input : std::span<const std::byte>(operation.output)),
          tag + 1);
  } catch (...) {
    completion->part_done(std::current_exception());
    return;
  }
  completion->expect(0, nullptr);
  // Gloo's own deadline for messages is the group's.
  std::thread([self = shared_from_this(), transfer, header, header_work, data_work, expected,
               completion, memory = std::move(memory), tag, sends, output = operation.output,
               timeout = engine_timeout(operation)]() mutable {
    std::exception_ptr error;
    try {
      if (header_work) header_work->wait(timeout);
      if (header_work && !sends) {
        fabric::check_message(self->membership().name, self->rank_, expected, *header);
        data_work = transfer(bytes_tensor(output), tag + 1);
      }
      data_work->wait(timeout);
    } catch (...) {
      error = std::current_exception();
    }
    header_work.reset();
    data_work.reset();
    self.reset();  // a waiting thread then holds the last reference to the group
    completion->part_done(error);
  }).detach();
}

}  // namespace

std::shared_ptr<detail::GroupImpl> make_process_group(detail::Membership membership,
                                                      std::string backend,
                                                      c10::intrusive_ptr<Engine> engine,
                                                      TagSetter set_tag) {
  return std::make_shared<EngineGroup>(std::move(membership), std::move(backend), std::move(engine),
                                       std::move(set_tag));
}

}  // namespace lockstep::comm::gloo
