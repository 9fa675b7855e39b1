// SPDX-License-Identifier: Apache-2.0
// Ranks that communicate with each other.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/core/clock.h"
#include "lockstep/core/dtype.h"
#include "lockstep/core/rank_env.h"
#include "lockstep/core/torch_fwd.h"
#include "lockstep/layout/parallel_config.h"

namespace lockstep::comm {

namespace detail {
class GroupImpl;
struct GroupAccess;
}  // namespace detail

// A value: copies share the group. All ranks of a group call its operations in the same order;
// operations of different groups are independent. Default-constructed it is a group of one, on
// which every operation is a no-op.
class Group {
 public:
  Group();
  explicit Group(std::shared_ptr<detail::GroupImpl> impl) : impl_(std::move(impl)) {}

  int rank() const;
  int size() const;
  const std::string& name() const;   // "world", "world.0/dp_group_tp1_pp0": unique in the job
  std::string_view backend() const;  // "thread", "shm", "mpi", "gloo", "nccl"
  layout::CommStrategy strategy() const;
  std::span<const int> members() const;  // world rank of every member
  // Place among, and number of, the members on this rank's host, from the real host layout.
  int local_rank() const;
  int local_size() const;
  milliseconds timeout() const;
  // What threads of this rank have spent so far in operations and waits of this job's groups,
  // added up: communication that nothing overlapped.
  std::chrono::nanoseconds blocked_time() const;

  // Collective: the ranks of one colour (at least 0) become a group, ordered by key, then by rank.
  // With `check`, its ranks compare operations before running them, whatever InitOptions says.
  Group split(int colour, int key, bool check = false) const;
  // The same; the name of the group has the label, "dp_group_tp0_pp1", in place of the colour, and
  // so have its errors and traces. ConfigError unless each colour has one label of its own.
  Group split_named(int colour, int key, const std::string& label) const;
  // Collective: the same ranks, whose operations go by another strategy. Its splits do too.
  Group with_strategy(layout::CommStrategy strategy) const;
  // Collective: the same ranks, whose waits have another deadline. Its splits do too.
  Group with_timeout(milliseconds timeout) const;

 private:
  friend struct detail::GroupAccess;
  Group split_as(int colour, int key, bool check, const std::string& label) const;

  std::shared_ptr<detail::GroupImpl> impl_;
};

// Whether this build, or a call of register_backend, has a backend of this name.
bool has_backend(const std::string& name);

using layout::CommStrategy;

struct InitOptions {
  // "auto": nccl when every rank has a GPU of its own; else, and in addition for host memory, shm
  // when all ranks are on one host, else mpi under an MPI launcher, else gloo.
  std::string backend = "auto";
  // How collectives are formed: docs/collectives.md. Groups split from the world inherit it.
  CommStrategy strategy = CommStrategy::all_reduce;
  // Deadline of every wait that gives no other. LOCKSTEP_TIMEOUT (seconds) sets the default.
  milliseconds timeout = milliseconds{0};
  // Compare the operations of all ranks before they run, and, under mpi and gloo, what arrives from
  // other hosts with its checksum. Without it (LOCKSTEP_CHECK=0) ranks that disagree get wrong
  // numbers, or wait for ever, on all backends but thread and shm: it is there to measure what
  // comparing costs.
  bool check = true;
  // A group of one, too, is made by the backend and runs its operations, instead of doing nothing:
  // to try a backend out.
  bool force_backend_on_single_rank = false;
};

// Joins the job that this process was started in, and returns the group of all its ranks.
// Collective. A process that no launcher started is a group of one.
Group init(InitOptions options = {});
Group init(const RankEnv& env, InitOptions options = {});

// The CPU cores of one rank. init() does not set the number of compute threads, and binds nothing:
// a program that mpirun, srun or torchrun starts passes `threads` to at::set_num_threads, because
// libtorch counts the cores of the host and not those of the rank, and calls bind_to_cores().
struct CoreShare {
  int threads = 1;   // compute threads for this rank, at least 1
  double cores = 1;  // of its affinity mask; a core that n ranks of the host may use counts 1 / n
  // The cores to bind this rank to, if ranks of one host have the same mask and each can have cores
  // of its own. Empty if the launcher has bound the ranks, or if the user chose the threads.
  std::vector<int> own = {};
};

// Collective. `threads` is `cores` rounded down, or the OMP_NUM_THREADS that the user or
// `lockstep run` has set.
CoreShare share_of_cores(const Group& group);

// Binds the calling thread, and the threads that it starts from now on, to share.own, as
// `lockstep run` binds the ranks that it starts. Does nothing if that is empty.
void bind_to_cores(const CoreShare& share);

// Runs `body` on `size` threads, each with its own rank of one group, and waits for them. The first
// failure is rethrown. `hosts` has a number for each rank, equal for those that count as being on
// one host; empty: all are.
void run_threads(int size, const std::function<void(Group)>& body,
                 InitOptions options = {.backend = "thread"}, std::vector<int> hosts = {});

// Memory of the group: under shm every rank of the host maps it, and collectives on it need no
// staging. Collective by contract: every rank allocates the same sizes in the same order.
// Uninitialised. Lives as long as its last tensor.
at::Tensor symmetric_empty(std::span<const int64_t> sizes, DType dtype, const Group& group);
// The same on the device. Under nccl, NCCL allocates it and knows it (from 1 MB on, and from its
// version 2.19 on); elsewhere it is ordinary memory.
at::Tensor symmetric_empty(std::span<const int64_t> sizes, DType dtype, const Group& group,
                           const c10::Device& device);
// True if peers can reach this tensor's memory without staging.
bool is_symmetric(const at::Tensor& tensor, const Group& group);
// True if the group communicates from and to this device's memory; false if it copies tensors of
// the device to host memory first. Always false for the CPU.
bool uses_device_memory(const Group& group, const c10::Device& device);

}  // namespace lockstep::comm
