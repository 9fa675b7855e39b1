// SPDX-License-Identifier: Apache-2.0
#include "lockstep/comm/backends/local_group.h"

#include <ATen/Parallel.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <thread>
#include <vector>

#include "lockstep/comm/op_trace.h"
#include "lockstep/core/trace.h"
#include "lockstep/flight/recorder.h"

namespace lockstep::comm::detail {
namespace {

fabric::Seat take_seat(const Membership& membership, std::shared_ptr<fabric::Board> board,
                       std::shared_ptr<fabric::SharedHeap> heap) {
  fabric::Seat seat(std::move(board), membership.rank, membership.name, std::move(heap),
                    membership.world->peer_heaps);
  seat.expect_joining();
  return seat;
}

// The launcher of these ranks names who is late, once and with its stacks.
milliseconds warn_after(const World& world) {
  if (flight::is_watched() && !world.objects) return std::chrono::hours{24 * 365};
  return fabric::EngineOptions{}.warn_after;
}

// As many threads as the rank computes with, if the host has cores for those of all its ranks.
std::function<int()> idle_threads(const Membership& membership) {
  const std::vector<int>& hosts = membership.world->hosts;
  const auto me = static_cast<size_t>(membership.members[static_cast<size_t>(membership.rank)]);
  const auto ranks = me < hosts.size() ? std::ranges::count(hosts, hosts[me])
                                       : static_cast<int64_t>(membership.members.size());
  const auto most = static_cast<int>(std::max<int64_t>(sysconf(_SC_NPROCESSORS_ONLN) / ranks, 1));
  return [most] { return std::min(at::get_num_threads(), most); };
}

class LocalGroup final : public GroupImpl, public std::enable_shared_from_this<LocalGroup> {
 public:
  LocalGroup(Membership membership, const std::string& backend, std::shared_ptr<fabric::Board> board,
             std::shared_ptr<fabric::SharedHeap> heap, std::function<std::string(int)> probe, bool traced)
      : GroupImpl(std::move(membership), backend),
        heap_(std::move(heap)),
        trace_(this->membership()),
        engine_(take_seat(this->membership(), std::move(board), heap_),
                {.probe = std::move(probe), .on_done = traced && trace::enabled() ? [this](const fabric::Ticket& ticket) {
                   trace_.add(ticket.operation, ticket.sequence, ticket.started, ticket.finished);
                 } : std::function<void(const fabric::Ticket&)>(),
                 .warn_after = warn_after(*this->membership().world),
                 .threads = idle_threads(this->membership())}) {}

  std::shared_ptr<Pending> submit(fabric::Operation operation,
                                  std::shared_ptr<const void> memory) override {
    return std::make_shared<LocalPending>(shared_from_this(),
                                          engine_.submit(std::move(operation), std::move(memory)));
  }
  std::shared_ptr<Pending> announce(fabric::Operation operation) override {
    operation.announced = true;
    operation.input = {};
    operation.output = {};
    return submit(std::move(operation), nullptr);
  }
  std::shared_ptr<std::byte> allocate(size_t bytes) override {
    return heap_ ? heap_->allocate(bytes) : nullptr;
  }
  bool reaches(const void* data, size_t bytes) const override {
    return !heap_ || heap_->find(data, bytes).kind != fabric::Location::unreachable;
  }
  fabric::Location locate(const void* data, size_t bytes) const override {
    // An empty tensor has nothing to read, wherever it is.
    if (bytes == 0) return {fabric::Location::address, 0, 0, reinterpret_cast<uint64_t>(data)};
    return engine_.seat().lend(data, bytes);
  }
  std::shared_ptr<const std::byte> reach(int rank,
                                         const fabric::Location& location) const override {
    return engine_.seat().borrow(rank, location);
  }
  bool abort(const std::string& why) override {
    engine_.abort(why);
    return true;
  }
  bool sums_in_rank_tree() const override { return true; }

  // Operations that run when the last handle is dropped come to their end first: their owner may be
  // gone, but their peers and their tensors are not. On a thread of its own, because a destructor
  // does not wait, and because the caller may be what drives the engine.
  // The copy in a forked child is left alone: its threads are the parent's, and what it says on the
  // board, its peers would take for the parent's words.
  static void release(LocalGroup* group) {
    const fabric::Seat& seat = group->engine_.seat();
    if (seat.board().slot(seat.rank()).pid != getpid()) return;
    if (group->engine_.is_idle()) {
      delete group;
      return;
    }
    std::thread([group] {
      group->engine_.drain();
      delete group;
    }).detach();
  }

 private:
  struct LocalPending final : Pending {
    LocalPending(std::shared_ptr<LocalGroup> g, std::shared_ptr<fabric::Ticket> t)
        : group(std::move(g)), ticket(std::move(t)) {}
    ~LocalPending() override {
      if (ticket->operation.unhurried && !done()) group->engine_.let_go();
    }
    void wait() override { group->engine_.wait(*ticket); }
    bool done() const override { return ticket->done.load(std::memory_order_acquire); }

    std::shared_ptr<LocalGroup> group;  // an operation in flight keeps its group
    std::shared_ptr<fabric::Ticket> ticket;
  };

  std::shared_ptr<fabric::SharedHeap> heap_;
  OperationTrace trace_;
  fabric::Engine engine_;
};

}  // namespace

std::shared_ptr<GroupImpl> make_local_group(Membership membership, const std::string& backend,
                                            std::shared_ptr<fabric::Board> board,
                                            std::shared_ptr<fabric::SharedHeap> heap,
                                            std::function<std::string(int)> probe, bool traced) {
  const std::shared_ptr<LocalGroup> group(
      new LocalGroup(std::move(membership), backend, std::move(board), std::move(heap),
                     std::move(probe), traced),
      LocalGroup::release);
  // The board's memory ends with the rank that made it, so no rank leaves before all have opened
  // it.
  group
      ->submit({.kind = fabric::OpKind::barrier,
                .tag = "join",
                .timeout = group->membership().world->timeout},
               nullptr)
      ->wait();
  return group;
}

}  // namespace lockstep::comm::detail
