// SPDX-License-Identifier: Apache-2.0
// c10d's engines run operations on threads of their own and call back.
#include "lockstep/comm/backends/gloo/process_group.h"

#include <mutex>
#include <thread>
#include <utility>

#include "lockstep/comm/backends/gloo/engine_calls.h"
#include "lockstep/comm/backends/gloo/no_sigpipe.h"
#include "lockstep/comm/backends/gloo/tags.h"
#include "lockstep/comm/control/call_consistency.h"
#include "lockstep/comm/control/verified_operation.h"
#include "lockstep/comm/control/watched_operation.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/fabric/agreement.h"

namespace lockstep::comm::gloo {
namespace {

using detail::Completion;
using detail::VerifiedOperation;
using fabric::Operation;
using fabric::OpKind;

constexpr uint32_t kTagsOfStep = 0x80;

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
  bool sums_in_rank_tree() const override { return consistency_.exchanges(); }

 private:
  class Announced;

  // Gives operations to the engine; what comes of them, an error too, goes to `completion`.
  void begin(std::span<const Operation> operations, uint32_t tag,
             const std::shared_ptr<const void>& memory,
             const std::shared_ptr<Completion>& completion);
  // Runs all steps but the last to their end, so that engines without tags get the same calls in
  // the same order on all ranks. Throws what comes of those.
  void begin_verified(const Operation& operation, uint64_t sequence,
                      const std::shared_ptr<VerifiedOperation>& verified,
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

  int next_tag(const Operation& operation);
  void begin_message(const Operation& operation, uint64_t sequence,
                     std::shared_ptr<const void> memory, int tag,
                     const std::shared_ptr<Completion>& completion);
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
    begin({&operation, 1}, tag_of(operation, sequence), memory, completion);
  } else if (consistency_.exchanges()) {
    const auto verified = std::make_shared<VerifiedOperation>(watchdog_.arrivals(), operation,
                                                              sequence, std::move(memory));
    memory = verified;
    agreed = consistency_.post(
        operation, sequence,
        [self = shared_from_this(), operation, sequence, verified, completion] {
          self->begin_verified(operation, sequence, verified, completion);
        },
        exchange_for(operation, sequence), verified);
  } else {
    ++num_held_back_;
    agreed = consistency_.post(
        operation, sequence,
        [self = shared_from_this(), operation, sequence, memory, completion] {
          self->begin({&operation, 1}, tag_of(operation, sequence), memory, completion);
          --self->num_held_back_;
        },
        nullptr);
  }
  return pending(std::move(operation), sequence, started, std::move(completion), std::move(memory),
                 std::move(agreed));
}

void EngineGroup::begin_verified(const Operation& operation, uint64_t sequence,
                                 const std::shared_ptr<VerifiedOperation>& verified,
                                 const std::shared_ptr<Completion>& completion) {
  uint32_t tag = tag_of(operation, sequence);
  const size_t last = verified->num_steps() - 1;
  Operation part = operation;
  part.announced = true;  // traces have the whole
  for (size_t step = 0; step < last; ++step, tag += kTagsOfStep) {
    const auto moved = std::make_shared<Completion>(1);
    begin(verified->step(step), tag, verified, moved);
    pending(part, sequence, Clock::now(), moved, verified, nullptr)->wait();
    verified->finish(step);
  }
  completion->expect(0, [verified, last] { verified->finish(last); });
  begin(verified->step(last), tag, verified, completion);
}

void EngineGroup::begin(std::span<const Operation> operations, uint32_t tag,
                        const std::shared_ptr<const void>& memory,
                        const std::shared_ptr<Completion>& completion) {
  const NoSigpipe no_signal;
  std::exception_ptr error;
  try {
    const std::lock_guard lock(mutex_);  // of a tag and the call that takes it
    if (set_tag_) set_tag_(tag);
    for (const Operation& operation : operations) {
      Started begun = start(*group_, operation, memory);
      completion->expect(begun.works.size(), std::move(begun.finish));
      follow(begun.works, begun.memory, completion);
    }
  } catch (const c10::Error& refused) {
    error = std::make_exception_ptr(
        CommError(format("{} refused it: {}", backend(), refused.what_without_backtrace())));
  } catch (...) {
    error = std::current_exception();
  }
  completion->part_done(error);
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
  begin_message(operation, sequence, memory, next_tag(operation), completion);
  auto agreed = consistency_.has_board() ? consistency_.post_message(operation) : nullptr;
  return pending(std::move(operation), sequence, started, std::move(completion), std::move(memory),
                 std::move(agreed));
}

// Every message has tags of its own, so that a header can be looked at before the data is asked
// for. The works of sends and receives can only be waited for, so a thread does that.
void EngineGroup::begin_message(const Operation& operation, uint64_t sequence,
                                std::shared_ptr<const void> memory, int tag,
                                const std::shared_ptr<Completion>& completion) {
  const NoSigpipe no_signal;
  const bool sends = operation.kind == OpKind::send;
  const auto transfer = [this, sends, peer = operation.root](std::span<const std::byte> bytes,
                                                             int with_tag) {
    std::vector<at::Tensor> tensors{bytes_tensor(bytes)};
    return sends ? group_->send(tensors, peer, with_tag) : group_->recv(tensors, peer, with_tag);
  };
  const auto header =
      consistency_.exchanges() ? std::make_shared<detail::MessageHeader>() : nullptr;
  const auto data = sends ? operation.input : std::span<const std::byte>(operation.output);
  WorkHandle header_work, data_work;
  try {
    if (header && sends) header->fill(operation);
    if (header) header_work = transfer(std::as_bytes(std::span(header.get(), 1)), tag);
    if (sends || !header) data_work = transfer(data, tag + 1);
  } catch (...) {
    completion->part_done(std::current_exception());
    return;
  }
  completion->expect(0, nullptr);
  // Gloo's own deadline for messages is the group's.
  std::thread([self = shared_from_this(), transfer, header, header_work, data_work, data,
               completion, operation, sequence, memory = std::move(memory), tag, sends,
               timeout = engine_timeout(operation)]() mutable {
    std::exception_ptr error;
    try {
      const detail::Arrivals& arrivals = *self->watchdog_.arrivals();
      if (header_work) header_work->wait(timeout);
      if (header_work && !sends) {
        header->check(arrivals, operation, sequence);
        fabric::check_message(self->membership().name, self->rank_, fabric::signature_of(operation),
                              header->signature);
        data_work = transfer(data, tag + 1);
      }
      data_work->wait(timeout);
      if (header_work && !sends)
        arrivals.check(operation, sequence, operation.root, operation.output, header->data_sum);
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
