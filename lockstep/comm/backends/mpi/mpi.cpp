// SPDX-License-Identifier: Apache-2.0
// Small collectives and messages are MPI's non-blocking calls, driven by the thread that waits, and
// by a thread of ours where none does. Large collectives are its blocking calls, which are faster,
// on a thread of their own. The two kinds use different communicators: each sees its calls in the
// same order on every rank.
#include "lockstep/comm/backends/mpi/mpi.h"

#include <sched.h>

#include <exception>
#include <mutex>
#include <thread>
#include <utility>

#include "lockstep/comm/adopt.h"
#include "lockstep/comm/backends/mpi/adopt_mpi.h"
#include "lockstep/comm/backends/mpi/communicator.h"
#include "lockstep/comm/backends/mpi/runtime.h"
#include "lockstep/comm/backends/mpi/worker.h"
#include "lockstep/comm/control/call_consistency.h"
#include "lockstep/comm/control/operation_watchdog.h"
#include "lockstep/comm/op_trace.h"
#include "lockstep/comm/reduction_lowering.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/fabric/agreement.h"

namespace lockstep::comm::mpi {
namespace {

using fabric::Operation;
using fabric::OpKind;

constexpr size_t kSmallBytes = 64 << 10;
constexpr int kTags = 1 << 14;  // MPI promises tags up to 32767

// Tells the members' call that makes a communicator from those for other groups, and from what an
// earlier incarnation may have left unfinished.
int tag_of(const detail::Membership& membership) {
  const auto text = format("{} {}", membership.name, membership.world->incarnation);
  return static_cast<int>(std::hash<std::string>()(text) % kTags);
}

class MpiGroup final : public detail::GroupImpl, public std::enable_shared_from_this<MpiGroup> {
 public:
  // Ranks of the job are ranks of `world`.
  MpiGroup(detail::Membership membership, MPI_Comm world)
      : GroupImpl(std::move(membership), "mpi"),
        watchdog_(this->membership()),
        trace_(this->membership()),
        small_(world, this->membership().members, tag_of(this->membership())),
        worker_(std::make_shared<Worker>(small_.duplicate())),
        messages_(small_.duplicate()),
        consistency_(this->membership(), watchdog_) {}

  ~MpiGroup() override {
    bool is_busy = false;
    {
      const std::lock_guard lock(worker_->mutex);
      worker_->stopping = true;
      if (broken_) worker_->queue.clear();
      std::erase_if(worker_->in_flight, [](const auto& progress) {
        const std::lock_guard progress_lock(progress->mutex);
        progress->test();
        return progress->done;
      });
      // What MPI will write to some day must be there then.
      if (broken_) {
        for (auto& progress : worker_->in_flight) {
          const std::lock_guard progress_lock(progress->mutex);
          if (!progress->done) new std::shared_ptr<Progress>(progress);
        }
        worker_->in_flight.clear();
      }
      is_busy = worker_->busy || !worker_->queue.empty() || !worker_->in_flight.empty();
      if (is_busy) worker_->unfinished = std::make_unique<Unfinished>();
      worker_->arrived.notify_all();
    }
    if (!thread_.joinable()) return;
    if (is_busy) {
      // Of a rank that has failed the others may never begin it.
      if (broken_ || std::uncaught_exceptions() > 0) do_not_finalize();
      thread_.detach();
    } else {
      thread_.join();
    }
  }

  std::shared_ptr<detail::Pending> submit(Operation operation,
                                          std::shared_ptr<const void> memory) override;
  std::shared_ptr<detail::Pending> announce(Operation operation) override;
  // Those that run cannot be ended, but none begins.
  bool abort(const std::string& why) override {
    consistency_.abort(why);
    return false;
  }
  std::shared_ptr<std::byte> allocate(size_t) override { return nullptr; }
  bool reaches(const void*, size_t) const override { return false; }
  bool sums_in_rank_tree() const override { return consistency_.exchanges(); }

 private:
  class MpiPending;
  class Announced;

  std::shared_ptr<Progress> begin_message(const Operation& operation, uint64_t sequence);
  // Gives a collective to MPI if it is small, else to the thread that runs it.
  void begin(const Operation& adapted, bool small, std::function<void(const Communicator&)> run,
             const std::shared_ptr<Progress>& progress);
  // How ranks of several hosts gather what they call.
  detail::CallConsistency::Exchange exchange_for(const Operation& operation, uint64_t sequence);
  void wait(const Operation& operation, uint64_t sequence, Clock::time_point started,
            Progress& progress, detail::Pending* agreed);
  [[noreturn]] void fail(std::exception_ptr failure, bool all_know);
  // With its mutex held.
  void start_thread() {
    if (!thread_.joinable()) thread_ = std::thread([worker = worker_] { worker->work(); });
    worker_->arrived.notify_one();
  }
  // No thread waits for it; MPI still has its memory.
  void abandon(std::shared_ptr<Progress> progress) {
    const std::lock_guard lock(worker_->mutex);
    worker_->in_flight.push_back(std::move(progress));
    start_thread();
  }

  detail::OperationWatchdog watchdog_;
  detail::OperationTrace trace_;
  Communicator small_;
  const std::shared_ptr<Worker> worker_;
  const std::unique_ptr<Communicator> messages_;
  std::map<std::pair<OpKind, int>, int> message_numbers_;  // with submit_mutex_
  std::mutex submit_mutex_;
  std::atomic<bool> broken_{false};
  std::thread thread_;
  detail::CallConsistency consistency_;
};

// Until it has been run by other means.
class MpiGroup::Announced final : public detail::Pending {
 public:
  Announced(std::shared_ptr<MpiGroup> group, std::shared_ptr<Pending> agreed,
            std::shared_ptr<Pending> running)
      : group_(std::move(group)), agreed_(std::move(agreed)), running_(std::move(running)) {}
  void wait() override {
    if (agreed_) agreed_->wait();
  }
  bool done() const override { return !agreed_ || agreed_->done(); }

 private:
  std::shared_ptr<MpiGroup> group_;
  std::shared_ptr<Pending> agreed_, running_;
};

class MpiGroup::MpiPending final : public detail::Pending {
 public:
  MpiPending(std::shared_ptr<MpiGroup> group, Operation operation, uint64_t sequence,
             Clock::time_point started, std::shared_ptr<Progress> progress,
             std::shared_ptr<const void> memory, std::shared_ptr<Pending> agreed)
      : group_(std::move(group)),
        operation_(std::move(operation)),
        sequence_(sequence),
        started_(started),
        progress_(std::move(progress)),
        memory_(std::move(memory)),
        agreed_(std::move(agreed)) {}

  ~MpiPending() override {
    if (ended_) return;
    {
      const std::lock_guard lock(progress_->mutex);
      progress_->dropped = true;
      // The thread has it, or will get it.
      if (progress_->done || progress_->running.requests.empty()) return;
    }
    group_->abandon(std::move(progress_));
  }

  void wait() override {
    if (ended_) return;
    group_->wait(operation_, sequence_, started_, *progress_, agreed_.get());
    group_->watchdog_.end(operation_, sequence_);
    group_->trace_.add(operation_, sequence_, started_, progress_->finished);
    memory_.reset();
    ended_ = true;
  }
  bool done() const override {
    if (ended_) return true;
    const bool may_begin = !agreed_ || !agreed_->done();
    const std::lock_guard lock(progress_->mutex);
    if (!progress_->running.requests.empty()) progress_->test();
    return progress_->done || (!progress_->begun && !may_begin);
  }

 private:
  std::shared_ptr<MpiGroup> group_;
  Operation operation_;
  uint64_t sequence_;
  Clock::time_point started_;
  std::shared_ptr<Progress> progress_;
  std::shared_ptr<const void> memory_;
  std::shared_ptr<Pending> agreed_;
  bool ended_ = false;
};

// Spins for a while, then gives the core to others, then naps: MPI has nothing to sleep on.
void relax(int& round) {
  if (++round < 200) return;
  if (round < 2000) {
    sched_yield();
  } else {
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

// Where ranks have not agreed MPI has nothing that would keep it from ending.
bool is_with_mpi(Progress& progress) {
  const std::lock_guard lock(progress.mutex);
  return progress.begun || !progress.running.requests.empty();
}

void MpiGroup::wait(const Operation& operation, uint64_t sequence, Clock::time_point started,
                    Progress& progress, detail::Pending* agreed) {
  try {
    if (agreed != nullptr) watchdog_.wait_for(*agreed);
    int round = 0;
    watchdog_.wait(operation, sequence, started, [&](milliseconds time) {
      const auto until = Clock::now() + time;
      std::unique_lock lock(progress.mutex);
      if (progress.running.requests.empty())
        return progress.changed.wait_until(lock, until, [&] { return progress.done; });
      while (true) {
        progress.test();
        if (progress.done) return true;
        if (round % 64 == 63 && Clock::now() >= until) return false;
        lock.unlock();
        relax(round);
        lock.lock();
      }
    });
    if (progress.error) {
      try {
        std::rethrow_exception(progress.error);
      } catch (const MismatchError&) {
        throw;
      } catch (const DamagedData&) {
        throw;
      } catch (const std::exception& error) {
        // Of a message that is too long for its receiver MPI says less than the header.
        if (progress.header && operation.kind == OpKind::recv)
          fabric::check_message(membership().name, membership().rank,
                                fabric::signature_of(operation), progress.header->signature);
        watchdog_.explain(operation, sequence, error.what());
      }
    }
  } catch (const MismatchError&) {
    // All ranks are alive and hear of it: what is left unfinished ends with MPI.
    fail(std::current_exception(), !fabric::is_message(operation.kind));
  } catch (...) {
    const std::exception_ptr failure = std::current_exception();
    if (is_with_mpi(progress)) {
      broken_ = true;
      do_not_finalize();
    }
    fail(failure, false);
  }
}

void MpiGroup::fail(std::exception_ptr failure, bool all_know) {
  try {
    watchdog_.fail(std::move(failure), all_know);
  } catch (const std::exception& error) {
    consistency_.abort(error.what());  // when the others have been told why
    throw;
  }
}

detail::CallConsistency::Exchange MpiGroup::exchange_for(const Operation& operation,
                                                         uint64_t sequence) {
  return [self = shared_from_this(), operation,
          sequence](const std::shared_ptr<detail::OperationWatchdog::Records>& records) {
    const auto progress = std::make_shared<Progress>();
    progress->memory = records;
    const auto ranks = static_cast<size_t>(self->membership().size());
    Operation gather{
        .kind = OpKind::all_gather,
        .input = records->mine,
        .output = records->all,
        .recv_counts = std::vector<int64_t>(ranks, static_cast<int64_t>(records->mine.size()))};
    self->small_.begin(gather, progress->running);
    try {
      self->wait(operation, sequence, Clock::now(), *progress, nullptr);
    } catch (...) {
      self->abandon(progress);
      throw;
    }
  };
}

std::shared_ptr<detail::Pending> MpiGroup::announce(Operation operation) {
  if (fabric::is_message(operation.kind)) return nullptr;
  const std::lock_guard lock(submit_mutex_);
  const uint64_t sequence = watchdog_.begin(operation);
  auto agreed =
      consistency_.post(operation, sequence, std::exchange(operation.finish, nullptr),
                        consistency_.exchanges() ? exchange_for(operation, sequence) : nullptr);
  return std::make_shared<Announced>(shared_from_this(), std::move(agreed),
                                     watchdog_.announce(operation, sequence));
}

// A header travels with the data, under a tag of its own. It follows the data of a send, whose
// checksum is taken meanwhile.
std::shared_ptr<Progress> MpiGroup::begin_message(const Operation& operation, uint64_t sequence) {
  auto progress = std::make_shared<Progress>();
  auto& requests = progress->running.requests;
  const int peer = operation.root, tag = message_numbers_[{operation.kind, peer}]++ % kTags;
  if (membership().world->check) {
    progress->header = std::make_unique<detail::MessageHeader>();
    progress->header->signature = fabric::signature_of(operation);
  }
  // Before anything is done with the data. The header lives as long as what looks at it.
  if (progress->header && operation.kind == OpKind::recv) {
    progress->finish = [name = membership().name, rank = membership().rank, operation, sequence,
                        arrivals = consistency_.exchanges() ? watchdog_.arrivals() : nullptr,
                        sent = progress->header.get()] {
      if (arrivals) sent->check(*arrivals, operation, sequence);
      fabric::check_message(name, rank, fabric::signature_of(operation), sent->signature);
      if (arrivals)
        arrivals->check(operation, sequence, operation.root, operation.output, sent->data_sum);
    };
  }
  const auto header = progress->header
                          ? std::as_writable_bytes(std::span(progress->header.get(), 1))
                          : std::span<std::byte>();
  if (operation.kind == OpKind::send) {
    messages_->begin_send(operation.input, peer, tag, requests);
    if (consistency_.exchanges()) progress->header->fill(operation);
    if (progress->header) messages_->begin_send(header, peer, kTags + tag, requests);
  } else {
    if (progress->header) messages_->begin_recv(header, peer, kTags + tag, requests);
    messages_->begin_recv(operation.output, peer, tag, requests);
  }
  return progress;
}

void MpiGroup::begin(const Operation& adapted, bool small,
                     std::function<void(const Communicator&)> run,
                     const std::shared_ptr<Progress>& progress) {
  bool dropped = false;
  {
    const std::lock_guard lock(progress->mutex);
    progress->begun = true;
    if (small) {
      try {
        small_.begin(adapted, progress->running);
      } catch (...) {
        progress->end(std::current_exception());
        return;
      }
    }
    // Where a collective of nothing makes no request, the thread ends it.
    small = !progress->running.requests.empty();
    dropped = progress->dropped;
  }
  if (small && dropped) return abandon(progress);
  const std::lock_guard lock(worker_->mutex);
  if (small) {
    worker_->small.push_back(progress);
    if (worker_->asleep) start_thread();
    return;
  }
  worker_->queue.push_back({std::move(run), progress});
  start_thread();
}

std::shared_ptr<detail::Pending> MpiGroup::submit(Operation operation,
                                                  std::shared_ptr<const void> memory) {
  const std::lock_guard lock(submit_mutex_);
  const uint64_t sequence = watchdog_.begin(operation);
  const auto started = Clock::now();
  std::shared_ptr<Progress> progress;
  std::shared_ptr<detail::Pending> agreed;
  if (fabric::is_message(operation.kind)) {
    progress = begin_message(operation, sequence);
    progress->memory = memory;
    progress->finish =
        detail::chain(std::move(progress->finish), std::exchange(operation.finish, nullptr));
    const std::lock_guard queue_lock(worker_->mutex);
    worker_->in_flight.push_back(progress);
    start_thread();
  } else {
    Operation adapted = operation;
    operation.finish = nullptr;
    std::function<void()> finish = std::exchange(adapted.finish, nullptr);
    std::shared_ptr<detail::VerifiedOperation> verified;
    if (consistency_.exchanges()) {
      verified = std::make_shared<detail::VerifiedOperation>(watchdog_.arrivals(), operation,
                                                             sequence, std::move(memory));
      memory = verified;
      adapted = verified->step(0)[0];
      finish =
          detail::chain([verified, last = verified->num_steps() - 1] { verified->finish(last); },
                        std::move(finish));
    } else if (operation.kind == OpKind::all_reduce || operation.kind == OpKind::reduce ||
               operation.kind == OpKind::reduce_scatter) {
      detail::Adapted form = detail::adapt_reduction(std::move(adapted), std::move(memory),
                                                     membership().rank, membership().size());
      adapted = std::move(form.operation);
      memory = std::move(form.memory);
    }
    // Every rank must take the same of the two ways: the choice looks only at what all ranks agree
    // on.
    const Operation& sized = verified ? operation : adapted;
    const bool small = operation.kind != OpKind::all_to_all &&
                       static_cast<size_t>(sized.count) * size_of(sized.dtype) <= kSmallBytes &&
                       (!verified || verified->num_steps() == 1);
    progress = std::make_shared<Progress>();
    progress->memory = memory;
    progress->finish = detail::chain(std::exchange(adapted.finish, nullptr), std::move(finish));
    agreed = consistency_.post(
        operation, sequence,
        [self = shared_from_this(), adapted = std::move(adapted), verified, small, progress] {
          self->begin(
              adapted, small,
              [adapted, verified](const Communicator& large) {
                const auto run = [&](const Operation& step) { large.run(step); };
                verified ? verified->run_steps(run) : run(adapted);
              },
              progress);
        },
        consistency_.exchanges() ? exchange_for(operation, sequence) : nullptr, verified);
  }
  return std::make_shared<MpiPending>(shared_from_this(), std::move(operation), sequence, started,
                                      std::move(progress), std::move(memory), std::move(agreed));
}

}  // namespace

bool is_available() { return true; }

std::string version() {
  char words[MPI_MAX_LIBRARY_VERSION_STRING] = "";
  int length = 0;
  MPI_Get_library_version(words, &length);
  const std::string text(words, static_cast<size_t>(length));
  return text.substr(0, text.find_first_of(",\n"));
}

std::shared_ptr<detail::GroupImpl> create(detail::Membership membership) {
  require_mpi();
  int size = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  if (static_cast<int>(membership.world->hosts.size()) != size) {
    throw ConfigError(
        format("backend mpi: the job has {} ranks but MPI's world has {}; start the program with "
               "mpirun or srun",
               membership.world->hosts.size(), size));
  }
  return std::make_shared<MpiGroup>(std::move(membership), MPI_COMM_WORLD);
}

void require_running() {
  int started = 0, ended = 0;
  MPI_Initialized(&started);
  MPI_Finalized(&ended);
  if (started == 0 || ended != 0)
    throw ConfigError(format("[adopt] MPI {}, must run: call MPI_Init_thread before",
                             started == 0 ? "has not been started" : "has been ended"));
  require_mpi();
}

Group adopt(int handle, InitOptions options) {
  const MPI_Comm given = MPI_Comm_f2c(handle);
  if (given == MPI_COMM_NULL) throw ConfigError("[adopt] the communicator is MPI_COMM_NULL");
  int between_groups = 0;
  check_mpi(MPI_Comm_test_inter(given, &between_groups), "MPI_Comm_test_inter");
  if (between_groups != 0)
    throw ConfigError(
        "[adopt] the communicator lies between two groups; merge them with "
        "MPI_Intercomm_merge");
  // The program's own traffic and ours must not meet. Like all communicators it ends with MPI.
  MPI_Comm own = MPI_COMM_NULL;
  check_mpi(MPI_Comm_dup(given, &own), "MPI_Comm_dup");
  MPI_Comm_set_errhandler(own, MPI_ERRORS_RETURN);
  int rank = 0, size = 0;
  MPI_Comm_rank(own, &rank);
  MPI_Comm_size(own, &size);
  const auto gather = [&](const std::string& text) {
    const auto mine = detail::to_record(text);
    std::vector<std::byte> all(mine.size() * static_cast<size_t>(size));
    check_mpi(MPI_Allgather(mine.data(), static_cast<int>(mine.size()), MPI_BYTE, all.data(),
                            static_cast<int>(mine.size()), MPI_BYTE, own),
              "MPI_Allgather");
    return detail::from_records(all);
  };
  const auto create = [own](detail::Membership membership) {
    return std::make_shared<MpiGroup>(std::move(membership), own);
  };
  return detail::adopt_world(rank, size, gather, {"mpi", is_available, create}, std::move(options));
}

}  // namespace lockstep::comm::mpi
