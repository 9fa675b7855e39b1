// SPDX-License-Identifier: Apache-2.0
// Waiting with a deadline on engines that only say "done" or "not yet": names who is late, and who
// is lost.
#pragma once

#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <span>

#include "lockstep/comm/backend.h"
#include "lockstep/comm/control/activity_reporter.h"
#include "lockstep/comm/control/verified_operation.h"

namespace lockstep::comm::detail {

// Tells all members of a group what broke it, and throws what one of them has told. The first is
// heard.
void tell_failure(launch::Store& store, const std::string& group, int rank,
                  const std::exception_ptr& error);
void throw_if_told(launch::Store& store, const std::string& group);

// One for each group. Thread safe.
class OperationWatchdog {
 public:
  // `engine` keeps apart what two of them report for one group.
  explicit OperationWatchdog(const Membership& membership, std::string engine = {});

  // An operation has begun; returns its number. Throws what broke the group, if something has.
  uint64_t begin(const fabric::Operation& operation);
  void throw_if_failed() const;
  // What another member has said of a failure, if one has.
  void throw_if_told() const;
  void end(const fabric::Operation& operation, uint64_t sequence);
  // For an operation that is run by other means: it ends with what is returned, which the group
  // must outlive.
  std::shared_ptr<Pending> announce(const fabric::Operation& operation, uint64_t sequence);

  // Calls poll(at most so long) until it says true. Warns after two seconds; throws PeerLost when a
  // member has died and TimeoutError at the operation's deadline, counted from `started`.
  void wait(const fabric::Operation& operation, uint64_t sequence, Clock::time_point started,
            const std::function<bool(milliseconds)>& poll) const;

  // Waits until ranks have agreed, for who then waits for the operation itself. Throws why they
  // have not, in the words of the rank that broke the group where one has.
  void wait_for(Pending& agreement) const;

  // What an engine's own error means: PeerLost if a member is found to be missing, else CommError
  // with its words. Tells the other members, who wait or will, that the group is broken and why;
  // then throws the same here, now and at every later begin().
  // Where all members have found out by themselves, none has to be waited for.
  [[noreturn]] void fail(std::exception_ptr error, bool all_know = false);
  // Compares what all ranks have called; `exchange` gathers one record of equal size from every
  // rank. An engine that is not done with them when it fails must continue to hold them. `sums` are
  // the checksums of what this rank sends to each; returned are those of what each sends to it.
  struct Records {
    std::vector<std::byte> mine, all;
  };
  std::vector<uint32_t> check_agreement(
      const fabric::Operation& operation, uint64_t sequence,
      const std::function<void(const std::shared_ptr<Records>&)>& exchange,
      std::vector<uint32_t> sums = {}) const;
  const std::shared_ptr<const Arrivals>& arrivals() const { return arrivals_; }

  [[noreturn]] void explain(const fabric::Operation& operation, uint64_t sequence,
                            const std::string& words) const;

 private:
  struct Peer {
    int rank;
    fabric::Activity activity;
  };
  std::vector<Peer> behind(const fabric::Operation& operation, uint64_t sequence) const;
  void throw_if_lost(const fabric::Operation& operation, uint64_t sequence) const;
  std::string describe_wait(const fabric::Operation& operation, uint64_t sequence,
                            double seconds) const;
  std::string key(int rank) const;
  std::optional<std::string> look_up(const std::string& key) const;

  std::string name_, engine_;
  int rank_;
  std::vector<int> members_;
  std::shared_ptr<launch::Store> store_;
  bool hosts_rendezvous_;
  bool launcher_watches_;  // it names who is late, once and with its stacks
  std::shared_ptr<ActivityReporter> reporter_;
  ActivityReporter::Word activity_;
  std::atomic<uint64_t> sequence_{0}, messages_{0};
  // Operations that outlive the group can break it too.
  struct Failure {
    std::mutex mutex;
    std::exception_ptr error;
    bool was_thrown = false;
  };
  const std::shared_ptr<Failure> failure_ = std::make_shared<Failure>();
  std::shared_ptr<const Arrivals> arrivals_;
};

}  // namespace lockstep::comm::detail
