// SPDX-License-Identifier: Apache-2.0
#include "lockstep/comm/backends/custom/custom_group.h"

#include <map>
#include <mutex>
#include <utility>

#include "lockstep/comm/backends/custom/message_collectives.h"
#include "lockstep/comm/control/call_consistency.h"
#include "lockstep/comm/control/watched_operation.h"
#include "lockstep/comm/serial_executor.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/fabric/agreement.h"

namespace lockstep::comm::detail {
namespace {

using fabric::Operation;
using fabric::OpKind;

// Collectives run one after another on one thread; messages on a thread for each peer and
// direction, so that none waits for one that has nothing to do with it.
class CustomGroup final : public GroupImpl, public std::enable_shared_from_this<CustomGroup> {
 public:
  CustomGroup(Membership membership, std::string backend, std::unique_ptr<Transport> collectives,
              std::unique_ptr<Transport> messages)
      : GroupImpl(std::move(membership), std::move(backend)),
        watchdog_(this->membership()),
        trace_(this->membership()),
        for_collectives_(std::move(collectives)),
        for_messages_(std::move(messages)),
        consistency_(this->membership(), watchdog_),
        collectives_(*for_collectives_, this->membership().rank, this->membership().size()) {}

  std::shared_ptr<Pending> submit(Operation operation,
                                  std::shared_ptr<const void> memory) override {
    const std::lock_guard lock(mutex_);  // operations are numbered in the order in which they run
    const uint64_t sequence = watchdog_.begin(operation);
    return post(std::move(operation), sequence, std::move(memory));
  }
  std::shared_ptr<Pending> announce(Operation operation) override {
    operation.announced = true;
    struct Announced final : Pending {
      Announced(std::shared_ptr<Pending> a, std::shared_ptr<Pending> r)
          : agreed(std::move(a)), running(std::move(r)) {}
      void wait() override {
        if (agreed) agreed->wait();
      }
      bool done() const override { return !agreed || agreed->done(); }
      std::shared_ptr<Pending> agreed, running;  // until it has been run by other means
    };
    const std::lock_guard lock(mutex_);
    const uint64_t sequence = watchdog_.begin(operation);
    auto running = watchdog_.announce(operation, sequence);
    return std::make_shared<Announced>(
        membership().world->check ? post(std::move(operation), sequence, nullptr) : nullptr,
        std::move(running));
  }
  // Those that run cannot be ended, but none begins.
  bool abort(const std::string& why) override {
    consistency_.abort(why);
    return false;
  }
  std::shared_ptr<std::byte> allocate(size_t) override { return nullptr; }
  bool reaches(const void*, size_t) const override { return false; }

 private:
  // With mutex_ held.
  std::shared_ptr<Pending> post(Operation operation, uint64_t sequence,
                                std::shared_ptr<const void> memory) {
    const auto started = Clock::now();
    const bool message = fabric::is_message(operation.kind);
    auto completion = std::make_shared<Completion>(1, std::exchange(operation.finish, nullptr));
    auto self = shared_from_this();
    SerialExecutor& executor =
        message ? message_executors_[{operation.kind, operation.root}] : collective_executor_;
    auto job = [self, operation, sequence, completion, memory, message]() mutable {
      std::exception_ptr error;
      try {
        message ? self->transfer(operation) : self->perform(operation, sequence);
      } catch (...) {
        error = std::current_exception();
        // What comes next in this stream of bytes is not what its receiver thinks.
        message ? self->for_messages_->abort() : void(self->collectives_failure_ = error);
      }
      self.reset();  // a waiting thread then holds the last reference to the group
      completion->part_done(error);
    };
    std::shared_ptr<Pending> agreed;
    if (!message && consistency_.has_board()) {
      agreed = consistency_.post(
          operation, sequence,
          [&executor, completion, job = std::move(job)] {
            completion->expect(0, nullptr);
            executor.post(job);
          },
          nullptr);
    } else {
      executor.post(std::move(job));
    }
    return std::make_shared<WatchedPending>(WatchedPending::Owner{self, watchdog_, trace_,
                                                                  [this](const std::string& why) {
                                                                    for_collectives_->abort();
                                                                    for_messages_->abort();
                                                                    consistency_.abort(why);
                                                                  }},
                                            std::move(operation), sequence, started,
                                            std::move(completion), std::move(memory),
                                            std::move(agreed));
  }

  void perform(const Operation& operation, uint64_t sequence) {
    if (collectives_failure_) std::rethrow_exception(collectives_failure_);
    if (membership().world->check && !consistency_.has_board()) {
      watchdog_.check_agreement(
          operation, sequence, [&](const std::shared_ptr<OperationWatchdog::Records>& records) {
            const std::span<const std::byte> mine(records->mine);
            MessageCollectives::Outputs blocks;
            for (std::span all(records->all); !all.empty(); all = all.subspan(mine.size()))
              blocks.push_back(all.first(mine.size()));
            collectives_.exchange(MessageCollectives::Inputs(blocks.size(), mine), blocks);
          });
    }
    if (!operation.announced) collectives_.run(operation);
  }

  // A header goes before the data.
  void transfer(const Operation& operation) {
    const bool check = membership().world->check;
    const fabric::Signature mine = fabric::signature_of(operation);
    if (operation.kind == OpKind::send) {
      if (check) for_messages_->send(operation.root, std::as_bytes(std::span(&mine, 1)));
      if (!operation.input.empty()) for_messages_->send(operation.root, operation.input);
      return;
    }
    if (check) {
      fabric::Signature theirs = mine;
      for_messages_->recv(operation.root, std::as_writable_bytes(std::span(&theirs, 1)));
      fabric::check_message(membership().name, membership().rank, mine, theirs);
    }
    if (!operation.output.empty()) for_messages_->recv(operation.root, operation.output);
  }

  OperationWatchdog watchdog_;
  OperationTrace trace_;
  std::unique_ptr<Transport> for_collectives_, for_messages_;
  CallConsistency consistency_;
  MessageCollectives collectives_;
  // Of the collective that failed first: ranks would take a later one's data for its. Only the
  // executor of collectives uses it.
  std::exception_ptr collectives_failure_;
  std::mutex mutex_;
  SerialExecutor collective_executor_;
  std::map<std::pair<OpKind, int>, SerialExecutor> message_executors_;
};

}  // namespace

std::shared_ptr<GroupImpl> make_custom_group(Membership membership, const std::string& backend,
                                             const TransportFactory& create) {
  const World& world = *membership.world;
  TransportSite site{.name = {},
                     .rank = membership.rank,
                     .size = membership.size(),
                     .hosts = {},
                     .timeout = world.timeout,
                     .store = world.store};
  for (const int member : membership.members)
    site.hosts.push_back(world.hosts[static_cast<size_t>(member)]);
  const auto make = [&](const char* purpose) {
    site.name = format("{}/{}/{}", backend, membership.name, purpose);
    try {
      if (auto transport = create(site)) return transport;
      throw ConfigError(format("[init] backend '{}' made no transport", backend));
    } catch (const Error&) {
      throw;
    } catch (const std::exception& error) {
      throw CommError(format("[init] rank {}: backend '{}' could not connect group '{}': {}",
                             membership.rank, backend, membership.name, error.what()));
    }
  };
  auto collectives = make("collectives");
  auto messages = make("messages");
  return std::make_shared<CustomGroup>(std::move(membership), backend, std::move(collectives),
                                       std::move(messages));
}

}  // namespace lockstep::comm::detail
