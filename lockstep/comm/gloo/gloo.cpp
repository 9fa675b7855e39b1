// c10d's Gloo group runs an operation on threads of its own and calls back when it is done. What it
// lacks is composed: uneven all_gather is a broadcast of each block, reduce_scatter an all_to_all
// and a local reduction in the fixed order.
#include "lockstep/comm/gloo/gloo.h"

#include <ATen/ops/from_blob.h>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <numeric>
#include <set>
#include <thread>

#include "lockstep/comm/adapt.h"
#include "lockstep/comm/gloo/no_sigpipe.h"
#include "lockstep/comm/gloo/store_adapter.h"
#include "lockstep/comm/op_trace.h"
#include "lockstep/comm/tensor.h"
#include "lockstep/comm/watch.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/fabric/agreement.h"
#include "lockstep/fabric/reduce.h"

namespace lockstep::comm::gloo {
namespace {

using detail::Adapted;
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
                       at::TensorOptions().dtype(detail::to_scalar_type(dtype)));
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

// Counts down as the parts of an operation end; keeps the first error.
class Completion {
 public:
  explicit Completion(size_t parts) : parts_(parts) {}
  void part_done(std::exception_ptr error) {
    const std::lock_guard lock(mutex_);
    if (error && !error_) error_ = std::move(error);
    --parts_;
    if (parts_ == 0) finished_ = Clock::now();
    changed_.notify_all();
  }
  bool wait_for(milliseconds time) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, time, [this] { return parts_ == 0 || error_; });
  }
  bool done() const {
    const std::lock_guard lock(mutex_);
    return parts_ == 0 || error_;
  }
  std::exception_ptr error() const {
    const std::lock_guard lock(mutex_);
    return error_;
  }
  Clock::time_point finished() const {
    const std::lock_guard lock(mutex_);
    return finished_;
  }

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  size_t parts_;
  Clock::time_point finished_;
  std::exception_ptr error_;
};

class GlooGroup final : public detail::GroupImpl, public std::enable_shared_from_this<GlooGroup> {
 public:
  explicit GlooGroup(detail::Membership membership)
      : GroupImpl(std::move(membership), "gloo"),
        watch_(this->membership()),
        trace_(this->membership()),
        size_(this->membership().size()),
        rank_(this->membership().rank) {
    const NoSigpipe no_signal;  // for the threads that Gloo starts now
    const detail::World& world = *this->membership().world;
    auto options = c10d::ProcessGroupGloo::Options::create(world.timeout);
    std::set<int> hosts;
    for (const int member : this->membership().members)
      hosts.insert(world.hosts[static_cast<size_t>(member)]);
    const char* interface = std::getenv("GLOO_SOCKET_IFNAME");
    options->devices.push_back(
        interface != nullptr ? c10d::ProcessGroupGloo::createDeviceForInterface(interface)
        : hosts.size() == 1  ? c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1")
                             : c10d::ProcessGroupGloo::createDefaultDevice());
    group_ = c10::make_intrusive<c10d::ProcessGroupGloo>(
        c10::make_intrusive<StoreAdapter>(world.store, "gloo/" + this->membership().name + "/",
                                          world.timeout),
        rank_, size_, options);
  }

  ~GlooGroup() override {
    const NoSigpipe no_signal;
    // A broken group may wait in Gloo until its own timeout: not here.
    if (broken_) std::thread([group = std::move(group_)]() mutable { group.reset(); }).detach();
    group_.reset();
  }

  std::shared_ptr<detail::Pending> submit(Operation operation,
                                          std::shared_ptr<const void> memory) override;
  std::shared_ptr<std::byte> allocate(size_t) override { return nullptr; }
  bool reaches(const void*, size_t) const override { return false; }

 private:
  struct Started {
    std::vector<WorkHandle> works;
    std::shared_ptr<const void> memory;
    std::function<void()> finish;
  };
  class GlooPending;

  Started start(const Operation& operation, std::shared_ptr<const void> memory);
  Started start_reduce_scatter(const Operation& operation, std::shared_ptr<const void> memory);
  Started start_all_to_all(const Operation& operation, std::shared_ptr<const void> memory);
  Started start_all_gather(const Operation& operation, std::shared_ptr<const void> memory);
  std::shared_ptr<Completion> start_message(const Operation& operation,
                                            std::shared_ptr<const void> memory, bool check);
  void wait_now(const Operation& operation, uint64_t sequence, std::vector<WorkHandle> works);
  std::shared_ptr<Completion> completion_of(const std::vector<WorkHandle>& works,
                                            const std::shared_ptr<const void>& memory);
  milliseconds gloo_timeout(const Operation& operation) const {
    return operation.timeout + milliseconds{500};
  }

  detail::Watch watch_;
  detail::OperationTrace trace_;
  int size_, rank_;
  std::atomic<bool> broken_{false};
  std::mutex mutex_;
  std::map<std::pair<OpKind, int>, int> message_numbers_;
  c10::intrusive_ptr<c10d::ProcessGroupGloo> group_;
};

class GlooGroup::GlooPending final : public detail::Pending {
 public:
  GlooPending(std::shared_ptr<GlooGroup> group, Operation operation, uint64_t sequence,
              Clock::time_point started, std::shared_ptr<Completion> completion,
              std::shared_ptr<const void> memory, std::function<void()> finish)
      : group_(std::move(group)),
        operation_(std::move(operation)),
        sequence_(sequence),
        started_(started),
        completion_(std::move(completion)),
        memory_(std::move(memory)),
        finish_(std::move(finish)) {}

  void wait() override {
    if (ended_) return;
    try {
      group_->watch_.wait(operation_, sequence_, started_,
                          [this](milliseconds time) { return completion_->wait_for(time); });
      if (const auto error = completion_->error()) {
        try {
          std::rethrow_exception(error);
        } catch (const Error&) {
          throw;
        } catch (const std::exception& gloo_error) {
          const std::string words = gloo_error.what();
          // Gloo has deadlines of its own, some as long as ours: whichever passes first.
          if (words.find("Timed out") != std::string::npos) wait_for_deadline();
          group_->watch_.explain(operation_, sequence_, words.substr(0, words.find('\n')));
        }
      }
    } catch (...) {
      group_->broken_ = true;
      group_->watch_.fail(std::current_exception());
    }
    if (finish_) finish_();
    group_->watch_.end(operation_, sequence_);
    group_->trace_.add(operation_, sequence_, started_, completion_->finished());
    memory_.reset();
    ended_ = true;
  }
  bool done() const override { return ended_ || (!finish_ && completion_->done()); }

 private:
  // Throws TimeoutError, or PeerLost where a member has died.
  void wait_for_deadline() const {
    group_->watch_.wait(operation_, sequence_, started_, [](milliseconds time) {
      std::this_thread::sleep_for(time);
      return false;
    });
  }

  std::shared_ptr<GlooGroup> group_;
  Operation operation_;
  uint64_t sequence_;
  Clock::time_point started_;
  std::shared_ptr<Completion> completion_;
  std::shared_ptr<const void> memory_;
  std::function<void()> finish_;
  bool ended_ = false;
};

std::shared_ptr<Completion> GlooGroup::completion_of(const std::vector<WorkHandle>& works,
                                                     const std::shared_ptr<const void>& memory) {
  auto completion = std::make_shared<Completion>(works.size());
  if (works.empty()) completion = std::make_shared<Completion>(1), completion->part_done(nullptr);
  for (const WorkHandle& work : works) {
    // The callback holds the work and its memory: they must live until Gloo has let go of them,
    // whether or not anybody waits.
    work->getFuture()->addCallback([completion, work, memory](c10::ivalue::Future& future) {
      completion->part_done(future.hasError() ? future.exception_ptr() : nullptr);
    });
  }
  return completion;
}

void GlooGroup::wait_now(const Operation& operation, uint64_t sequence,
                         std::vector<WorkHandle> works) {
  GlooPending(shared_from_this(), operation, sequence, Clock::now(), completion_of(works, nullptr),
              nullptr, nullptr)
      .wait();
}

std::shared_ptr<detail::Pending> GlooGroup::submit(Operation operation,
                                                   std::shared_ptr<const void> memory) {
  const uint64_t sequence = watch_.begin(operation);
  const NoSigpipe no_signal;
  const auto started = Clock::now();
  const bool check = membership().world->check;
  if (fabric::is_message(operation.kind)) {
    auto completion = start_message(operation, memory, check);
    return std::make_shared<GlooPending>(shared_from_this(), std::move(operation), sequence,
                                         started, std::move(completion), std::move(memory),
                                         nullptr);
  }
  if (check) {
    try {
      watch_.check_agreement(
          operation, sequence, [&](std::span<const std::byte> mine, std::span<std::byte> all) {
            std::vector<at::Tensor> inputs{bytes_tensor(mine)};
            std::vector<std::vector<at::Tensor>> outputs(1);
            for (int rank = 0; rank < size_; ++rank)
              outputs[0].push_back(
                  bytes_tensor(all.subspan(static_cast<size_t>(rank) * mine.size(), mine.size())));
            wait_now(operation, sequence, {group_->allgather(outputs, inputs)});
          });
    } catch (const MismatchError&) {
      broken_ = true;
      watch_.fail(std::current_exception());
    }
  }
  Started begun;
  try {
    begun = start(operation, std::move(memory));
  } catch (const c10::Error& error) {
    throw CommError(format("[{}] rank {}: gloo refused {}: {}", fabric::name_of(operation.kind),
                           rank_, fabric::describe(operation), error.what_without_backtrace()));
  }
  auto completion = completion_of(begun.works, std::make_shared<Started>(begun));
  return std::make_shared<GlooPending>(shared_from_this(), std::move(operation), sequence, started,
                                       std::move(completion), std::move(begun.memory),
                                       std::move(begun.finish));
}

GlooGroup::Started GlooGroup::start(const Operation& operation,
                                    std::shared_ptr<const void> memory) {
  const milliseconds timeout = gloo_timeout(operation);
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
                std::move(adapted.finish)};
      }
      // Gloo uses the tensors of the others as work space; ours stay as they are.
      if (rank_ != operation.root) tensors[0] = tensors[0].clone();
      c10d::ReduceOptions options;
      options.reduceOp = to_c10d(adapted.operation.reduce);
      options.rootRank = operation.root;
      options.timeout = timeout;
      return {
          {group_->reduce(tensors, options)}, std::move(adapted.memory), std::move(adapted.finish)};
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

GlooGroup::Started GlooGroup::start_all_gather(const Operation& operation,
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
    options.timeout = gloo_timeout(operation);
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
    options.timeout = gloo_timeout(operation);
    started.works.push_back(group_->broadcast(tensors, options));
  }
  return started;
}

GlooGroup::Started GlooGroup::start_all_to_all(const Operation& operation,
                                               std::shared_ptr<const void> memory) {
  const auto bytes = [&](std::vector<int64_t> counts) {
    for (auto& count : counts) count *= static_cast<int64_t>(size_of(operation.dtype));
    return counts;
  };
  at::Tensor output = bytes_tensor(operation.output), input = bytes_tensor(operation.input);
  std::vector<int64_t> receives = bytes(operation.recv_counts),
                       sends = bytes(operation.send_counts);
  c10d::AllToAllOptions options;
  options.timeout = gloo_timeout(operation);
  return {{group_->alltoall_base(output, input, receives, sends, options)}, std::move(memory), {}};
}

GlooGroup::Started GlooGroup::start_reduce_scatter(const Operation& operation,
                                                   std::shared_ptr<const void> memory) {
  if (operation.input.empty()) return {{}, std::move(memory), {}};
  const int64_t mine = operation.send_counts[static_cast<size_t>(rank_)];
  const size_t block = static_cast<size_t>(mine) * size_of(operation.dtype);
  auto parts = std::make_shared<std::vector<std::byte>>(block * static_cast<size_t>(size_));
  Operation exchange = operation;
  exchange.kind = OpKind::all_to_all;
  exchange.output = *parts;
  exchange.recv_counts = std::vector<int64_t>(static_cast<size_t>(size_), mine);
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

// Every message has tags of its own, so that a header can be looked at before the data is asked
// for. The works of sends and receives can only be waited for, so a thread does that.
std::shared_ptr<Completion> GlooGroup::start_message(const Operation& operation,
                                                     std::shared_ptr<const void> memory,
                                                     bool check) {
  const bool sends = operation.kind == OpKind::send;
  const int peer = operation.root;
  int tag = 0;
  {
    const std::lock_guard lock(mutex_);
    tag = 2 * (message_numbers_[{operation.kind, peer}]++ % (1 << 28));
  }
  auto header = std::make_shared<fabric::Signature>(fabric::signature_of(operation));
  const auto transfer = [this, sends, peer](at::Tensor tensor, int with_tag) {
    std::vector<at::Tensor> tensors{std::move(tensor)};
    return sends ? group_->send(tensors, peer, with_tag) : group_->recv(tensors, peer, with_tag);
  };
  const auto header_bytes = std::as_writable_bytes(std::span(header.get(), 1));
  auto completion = std::make_shared<Completion>(1);
  WorkHandle header_work, data_work;
  const fabric::Signature expected = *header;
  if (check) header_work = transfer(bytes_tensor(header_bytes), tag);
  if (sends || !check)
    data_work = transfer(
        bytes_tensor(sends ? operation.input : std::span<const std::byte>(operation.output)),
        tag + 1);
  std::thread([self = shared_from_this(), transfer, header, header_work, data_work, expected,
               completion, memory, tag, sends, output = operation.output]() mutable {
    std::exception_ptr error;
    try {
      if (header_work) header_work->wait();
      if (header_work && !sends) {
        fabric::check_message(self->membership().name, self->rank_, expected, *header);
        data_work = transfer(bytes_tensor(output), tag + 1);
      }
      data_work->wait();
    } catch (...) {
      error = std::current_exception();
    }
    completion->part_done(error);
  }).detach();
  return completion;
}

}  // namespace

bool is_available() { return true; }

std::shared_ptr<detail::GroupImpl> create(detail::Membership membership) {
  try {
    return std::make_shared<GlooGroup>(std::move(membership));
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    const std::string words = error.what();
    throw CommError("[init] gloo could not connect the group: " +
                    words.substr(0, words.find('\n')));
  }
}

}  // namespace lockstep::comm::gloo
