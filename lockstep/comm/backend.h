// SPDX-License-Identifier: Apache-2.0
// What a backend implements, and what all groups of a job share. Private to comm.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/comm/work.h"
#include "lockstep/core/torch_fwd.h"
#include "lockstep/fabric/heap.h"
#include "lockstep/fabric/operation.h"
#include "lockstep/launch/rendezvous/rendezvous.h"
#include "lockstep/launch/rendezvous/store.h"
#include "lockstep/layout/parallel_config.h"

namespace lockstep::comm::detail {

class ActivityReporter;
class GroupImpl;
class MessageFault;
class OrderedLine;
class SharedObjects;
struct Membership;

// Makes this rank's part of a group. Collective over its members.
using Factory = std::function<std::shared_ptr<GroupImpl>(Membership)>;

// One row for each backend that this build knows.
struct Backend {
  std::string name;
  std::function<bool()> is_available;
  Factory create;
  std::function<std::string()> version = {};  // of a library that is not ours
  std::function<std::string()> problem = {};  // why it is not available, where there is more to say
};

// A running operation. wait() may be called more than once.
class Pending {
 public:
  virtual ~Pending() = default;
  virtual void wait() = 0;
  virtual bool done() const = 0;
};

// This rank's view of the job, shared by all groups made from it.
struct World {
  std::shared_ptr<launch::RendezvousServer> server =
      nullptr;                                     // where this rank hosts the rendezvous
  std::shared_ptr<launch::Store> store = nullptr;  // destroyed before the server
  std::optional<Backend> adopted = std::nullopt;   // over what the program has brought
  // The same on all ranks, and no other start of communication has it: neither an earlier one of
  // these processes nor that of another job.
  uint64_t incarnation = 0;
  std::vector<int> hosts = {};  // for every rank of the world, a number for its host
  std::string address = {};     // by which other hosts reach this rank
  // What carries host memory where the chosen backend carries only that of devices.
  std::string host_backend = "shm";
  milliseconds timeout = kDefaultTimeout;
  bool check = true;                          // operations of all ranks are compared
  bool force_backend_on_single_rank = false;  // groups of one are the backend's too
  layout::CommStrategy strategy = layout::CommStrategy::all_reduce;
  // For CommStrategy::adaptive: what was measured on rank 0's machine (strategy/table.h). Set by
  // the first group that asks.
  std::optional<std::string> strategy_tables = std::nullopt;
  // Nanoseconds that this rank's threads spent in calls of the groups.
  std::shared_ptr<std::atomic<int64_t>> blocked = std::make_shared<std::atomic<int64_t>>(0);
  // Memory that this rank and its local peers share; made by the shm backend when first needed.
  std::shared_ptr<fabric::SharedHeap> heap = nullptr;
  std::shared_ptr<fabric::PeerHeaps> peer_heaps = nullptr;
  // Made by the first group whose backend has no shared memory.
  std::shared_ptr<ActivityReporter> reporter = nullptr;
  // What a test makes arrive damaged at this rank; null where nothing shall.
  std::shared_ptr<MessageFault> fault = nullptr;
  // Where the ranks are threads, shared by all of them.
  std::shared_ptr<SharedObjects> objects = nullptr;
};

// Who is in a group, before it exists.
struct Membership {
  std::string name;
  int rank = 0;              // of this process, in the group
  std::vector<int> members;  // world ranks in group order
  std::shared_ptr<World> world;

  int size() const { return static_cast<int>(members.size()); }
};

class GroupImpl {
 public:
  explicit GroupImpl(Membership membership, std::string backend);
  virtual ~GroupImpl() = default;

  const Membership& membership() const { return membership_; }
  const std::string& backend() const { return backend_; }
  int next_split() { return split_count_++; }
  // Enters a call of this rank into the flight recorder; the entry's ticket.
  uint64_t record(const fabric::Operation& operation) const;

  // Begins an operation whose arguments have been checked. `memory` keeps its buffers alive.
  virtual std::shared_ptr<Pending> submit(fabric::Operation operation,
                                          std::shared_ptr<const void> memory) = 0;
  // Begins an operation that is run by other means: it has a number and is compared with what the
  // other ranks call, as far as the backend does that, but no data moves. Keep what is returned
  // until it has been run. Null where the backend has no books.
  virtual std::shared_ptr<Pending> announce(fabric::Operation) { return nullptr; }
  // The device whose memory submit() takes for this tensor; -1: the host's, where the caller has to
  // bring it.
  virtual int device_for(const at::Tensor&) const { return -1; }
  // Symmetric memory, of the host or a device; null where the backend has none of its own.
  virtual std::shared_ptr<std::byte> allocate(size_t bytes) = 0;
  virtual std::shared_ptr<std::byte> allocate_on(int, size_t) { return nullptr; }
  // Peers can reach [data, data + bytes) without staging.
  virtual bool reaches(const void* data, size_t bytes) const = 0;
  // How peers find [data, data + bytes), and how this rank finds what a peer has located. Shared
  // memory stays, freed or not, until every member has reached it once and dropped what it got.
  // Thread safe. Backends without shared memory locate nothing.
  virtual fabric::Location locate(const void*, size_t) const { return {}; }
  virtual std::shared_ptr<const std::byte> reach(int, const fabric::Location&) const {
    return nullptr;
  }
  // Makes the operations of all members fail, those that run too. False where the backend cannot:
  // they end when a peer is lost, or late.
  virtual bool abort(const std::string&) { return false; }

  // Reductions are a binary tree over ranks, split at the largest power of two (fabric/reduce.h).
  virtual bool sums_in_rank_tree() const { return false; }

  // What sums in that order run on elsewhere (ordered.cpp); made with the first of them. Thread
  // safe.
  std::shared_ptr<OrderedLine> ordered_line();

 private:
  Membership membership_;
  std::string backend_;
  std::optional<uint16_t> recorded_as_;  // empty: its operations are not recorded
  std::atomic<int> split_count_{0};
  std::mutex mutex_;
  std::shared_ptr<OrderedLine> ordered_line_;
};

// The implementation of a group, which only comm sees.
struct GroupAccess {
  static const std::shared_ptr<GroupImpl>& impl(const Group& group) { return group.impl_; }
};
inline GroupImpl& impl_of(const Group& group) { return *GroupAccess::impl(group); }
inline const std::shared_ptr<GroupImpl>& shared_impl_of(const Group& group) {
  return GroupAccess::impl(group);
}

// Makes this rank's part of a group of any size, by the strategy of its world. Collective over the
// members; `backend` must be available.
std::shared_ptr<GroupImpl> make_group(Membership membership, const std::string& backend);
// The same by the backend's own strategy, which may be one that the program has brought.
std::shared_ptr<GroupImpl> make_plain_group(Membership membership, const std::string& backend);

// What register_backend does, for a backend that makes its groups itself.
void add_backend(Backend backend);

// Throws ConfigError that lists the names, or says that the backend is not in this build.
const Backend& find_backend(const std::string& name);

}  // namespace lockstep::comm::detail
