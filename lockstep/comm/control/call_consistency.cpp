// SPDX-License-Identifier: Apache-2.0
#include "lockstep/comm/control/call_consistency.h"

#include <algorithm>

#include "lockstep/comm/backends/shm/shm.h"
#include "lockstep/comm/control/watched_operation.h"

namespace lockstep::comm::detail {

std::shared_ptr<GroupImpl> make_announcement_group(const Membership& membership) {
  const auto& [name, rank, members, world] = membership;
  const auto host = [&](int member) { return world->hosts[static_cast<size_t>(member)]; };
  const bool one_host = std::all_of(members.begin(), members.end(),
                                    [&](int member) { return host(member) == host(members[0]); });
  return one_host ? shm::create_for_announcements(membership) : nullptr;
}

CallConsistency::CallConsistency(const Membership& membership, OperationWatchdog& watchdog)
    : watchdog_(watchdog), compares_(membership.world->check && membership.size() > 1) {
  if (compares_) board_ = make_announcement_group(membership);
}

std::shared_ptr<Pending> CallConsistency::post(fabric::Operation operation, uint64_t sequence,
                                               std::function<void()> start, Exchange exchange,
                                               std::shared_ptr<VerifiedOperation> verified) {
  if (!compares_) {
    if (start) start();
    return nullptr;
  }
  operation.finish = std::move(start);
  if (board_) return board_->announce(std::move(operation));

  struct Agreement final : Pending {
    Completion completion{1};
    void wait() override {
      while (!completion.wait_for(kDefaultTimeout)) continue;  // the exchange has the deadline
      if (const auto error = completion.error()) std::rethrow_exception(error);
    }
    bool done() const override { return completion.done(); }
  };
  const auto agreement = std::make_shared<Agreement>();
  executor_.post([this, agreement, sequence, operation = std::move(operation),
                  exchange = std::move(exchange), verified = std::move(verified)]() mutable {
    std::exception_ptr error;
    try {
      watchdog_.throw_if_failed();
      auto sums = watchdog_.check_agreement(operation, sequence, exchange,
                                            verified ? verified->sums() : std::vector<uint32_t>());
      if (verified) verified->expect(std::move(sums));
      if (operation.finish) operation.finish();
    } catch (...) {
      try {
        const std::exception_ptr failure = std::current_exception();
        watchdog_.fail(failure, is_mismatch(failure));  // also if no caller waits
      } catch (...) {
        error = std::current_exception();
      }
    }
    // What they own may be the last to have the group.
    operation.finish = nullptr;
    exchange = nullptr;
    verified = nullptr;
    agreement->completion.part_done(error);
  });
  return agreement;
}

std::shared_ptr<Pending> CallConsistency::post_message(fabric::Operation operation) {
  operation.finish = nullptr;
  return board_->announce(std::move(operation));
}

void CallConsistency::abort(const std::string& why) {
  if (board_) board_->abort(why);
}

}  // namespace lockstep::comm::detail
