// Small collectives and messages are MPI's non-blocking calls, moved on by whoever waits. Large
// collectives are its blocking calls, which are faster, on a thread of their own. The two kinds use
// different communicators: each sees its calls in the same order on every rank.
#include "lockstep/comm/mpi/mpi.h"

#include <sched.h>

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "lockstep/comm/adapt.h"
#include "lockstep/comm/adopt.h"
#include "lockstep/comm/mpi/adopt.h"
#include "lockstep/comm/mpi/communicator.h"
#include "lockstep/comm/mpi/runtime.h"
#include "lockstep/comm/op_trace.h"
#include "lockstep/comm/watch.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/fabric/agreement.h"

namespace lockstep::comm::mpi {
namespace {

using fabric::Operation;
using fabric::OpKind;

constexpr size_t kSmallBytes = 64 << 10;
constexpr int kTags = 1 << 14;  // MPI promises tags up to 32767

// What a thread or a poll brings to an end.
struct Progress {
  std::mutex mutex;
  std::condition_variable changed;
  Communicator::Running running;              // empty for a large collective
  std::unique_ptr<fabric::Signature> header;  // of a message, where messages are checked
  std::shared_ptr<const void> memory;         // what MPI reads and writes
  bool done = false;
  std::exception_ptr error;
  Clock::time_point finished;

  void end(std::exception_ptr failure) {
    done = true;
    error = std::move(failure);
    finished = Clock::now();
    memory.reset();
    changed.notify_all();
  }
  // One look at non-blocking requests; with `mutex` held.
  void test() {
    if (done) return;
    int complete = 0;
    try {
      check_mpi(MPI_Testall(static_cast<int>(running.requests.size()), running.requests.data(),
                            &complete, MPI_STATUSES_IGNORE),
                "MPI_Testall");
      if (complete != 0) end(nullptr);
    } catch (...) {
      end(std::current_exception());
    }
  }
};

// What the thread of a group shares with it, and has alone where MPI does not return, or not before
// the group is gone.
struct Worker {
  explicit Worker(std::unique_ptr<Communicator> communicator) : large(std::move(communicator)) {}
  void work();

  struct Large {
    Operation operation;
    std::shared_ptr<Progress> progress;
  };
  const std::unique_ptr<Communicator> large;
  std::mutex mutex;  // guards what follows
  std::condition_variable arrived;
  std::deque<Large> queue;
  // Messages, which may need a push while their owners compute, and what nobody waits for any more.
  std::vector<std::shared_ptr<Progress>> in_flight;
  bool busy = false, stopping = false;
};

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
        watch_(this->membership()),
        trace_(this->membership()),
        small_(world, this->membership().members, tag_of(this->membership())),
        worker_(std::make_shared<Worker>(small_.duplicate())),
        messages_(small_.duplicate()) {}

  ~MpiGroup() override {
    bool is_busy = false;
    {
      const std::lock_guard lock(worker_->mutex);
      worker_->stopping = true;
      if (broken_) worker_->queue.clear();
      is_busy = worker_->busy || !worker_->queue.empty();
      worker_->arrived.notify_all();
      // What MPI will write to some day must be there then.
      for (auto& progress : worker_->in_flight) {
        const std::lock_guard progress_lock(progress->mutex);
        if (!progress->done) new std::shared_ptr<Progress>(progress);
      }
    }
    if (!thread_.joinable()) return;
    if (is_busy) {
      do_not_finalize();
      thread_.detach();
    } else {
      thread_.join();
    }
  }

  std::shared_ptr<detail::Pending> submit(Operation operation,
                                          std::shared_ptr<const void> memory) override;
  std::shared_ptr<detail::Pending> announce(Operation operation) override {
    const std::lock_guard lock(submit_mutex_);
    const uint64_t sequence = watch_.begin(operation);
    if (membership().world->check) check(operation, sequence);
    return watch_.announce(operation, sequence);
  }
  std::shared_ptr<std::byte> allocate(size_t) override { return nullptr; }
  bool reaches(const void*, size_t) const override { return false; }

 private:
  class MpiPending;

  std::shared_ptr<Progress> begin_message(const Operation& operation);
  void check(const Operation& operation, uint64_t sequence);
  void wait(const Operation& operation, uint64_t sequence, Clock::time_point started,
            Progress& progress);
  // With its mutex held.
  void start_thread() {
    if (!thread_.joinable()) thread_ = std::thread([worker = worker_] { worker->work(); });
    worker_->arrived.notify_one();
  }
  // Nobody waits for it; MPI still has its memory.
  void abandon(std::shared_ptr<Progress> progress) {
    const std::lock_guard lock(worker_->mutex);
    worker_->in_flight.push_back(std::move(progress));
    start_thread();
  }

  detail::Watch watch_;
  detail::OperationTrace trace_;
  Communicator small_;
  const std::shared_ptr<Worker> worker_;
  const std::unique_ptr<Communicator> messages_;
  std::map<std::pair<OpKind, int>, int> message_numbers_;  // with submit_mutex_
  std::mutex submit_mutex_;
  std::atomic<bool> broken_{false};
  std::thread thread_;
};

class MpiGroup::MpiPending final : public detail::Pending {
 public:
  MpiPending(std::shared_ptr<MpiGroup> group, Operation operation, uint64_t sequence,
             Clock::time_point started, std::shared_ptr<Progress> progress,
             std::shared_ptr<const void> memory, std::function<void()> finish)
      : group_(std::move(group)),
        operation_(std::move(operation)),
        sequence_(sequence),
        started_(started),
        progress_(std::move(progress)),
        memory_(std::move(memory)),
        finish_(std::move(finish)) {}

  ~MpiPending() override {
    if (ended_) return;
    {
      const std::lock_guard lock(progress_->mutex);
      if (progress_->done || progress_->running.requests.empty()) return;  // the thread has it
    }
    group_->abandon(std::move(progress_));
  }

  void wait() override {
    if (ended_) return;
    group_->wait(operation_, sequence_, started_, *progress_);
    if (finish_) finish_();
    group_->watch_.end(operation_, sequence_);
    group_->trace_.add(operation_, sequence_, started_, progress_->finished);
    memory_.reset();
    ended_ = true;
  }
  bool done() const override {
    if (ended_) return true;
    const std::lock_guard lock(progress_->mutex);
    if (!progress_->running.requests.empty()) progress_->test();
    return progress_->done && !finish_;
  }

 private:
  std::shared_ptr<MpiGroup> group_;
  Operation operation_;
  uint64_t sequence_;
  Clock::time_point started_;
  std::shared_ptr<Progress> progress_;
  std::shared_ptr<const void> memory_;
  std::function<void()> finish_;
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

void MpiGroup::wait(const Operation& operation, uint64_t sequence, Clock::time_point started,
                    Progress& progress) {
  try {
    int round = 0;
    watch_.wait(operation, sequence, started, [&](milliseconds time) {
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
    if (progress.header && operation.kind == OpKind::recv)
      fabric::check_message(membership().name, membership().rank, fabric::signature_of(operation),
                            *progress.header);
    if (progress.error) {
      try {
        std::rethrow_exception(progress.error);
      } catch (const std::exception& error) {
        watch_.explain(operation, sequence, error.what());
      }
    }
  } catch (const MismatchError&) {
    // All ranks are alive and know of it: what is left unfinished ends with MPI.
    watch_.fail(std::current_exception());
  } catch (...) {
    broken_ = true;
    do_not_finalize();
    watch_.fail(std::current_exception());
  }
}

void MpiGroup::check(const Operation& operation, uint64_t sequence) {
  try {
    watch_.check_agreement(
        operation, sequence, [&](const std::shared_ptr<detail::Watch::Records>& records) {
          const auto progress = std::make_shared<Progress>();
          progress->memory = records;
          Operation gather{
              .kind = OpKind::all_gather,
              .input = records->mine,
              .output = records->all,
              .recv_counts = std::vector<int64_t>(static_cast<size_t>(membership().size()),
                                                  static_cast<int64_t>(records->mine.size()))};
          small_.begin(gather, progress->running);
          try {
            wait(operation, sequence, Clock::now(), *progress);
          } catch (...) {
            abandon(progress);
            throw;
          }
        });
  } catch (const MismatchError&) {
    watch_.fail(std::current_exception());
  }
}

// With checking on, a header travels beside the data, under a tag of its own.
std::shared_ptr<Progress> MpiGroup::begin_message(const Operation& operation) {
  auto progress = std::make_shared<Progress>();
  auto& requests = progress->running.requests;
  const int peer = operation.root, tag = message_numbers_[{operation.kind, peer}]++ % kTags;
  if (membership().world->check)
    progress->header = std::make_unique<fabric::Signature>(fabric::signature_of(operation));
  const auto header = progress->header
                          ? std::as_writable_bytes(std::span(progress->header.get(), 1))
                          : std::span<std::byte>();
  if (operation.kind == OpKind::send) {
    if (progress->header) messages_->begin_send(header, peer, kTags + tag, requests);
    messages_->begin_send(operation.input, peer, tag, requests);
  } else {
    if (progress->header) messages_->begin_recv(header, peer, kTags + tag, requests);
    messages_->begin_recv(operation.output, peer, tag, requests);
  }
  return progress;
}

std::shared_ptr<detail::Pending> MpiGroup::submit(Operation operation,
                                                  std::shared_ptr<const void> memory) {
  const std::lock_guard lock(submit_mutex_);
  const uint64_t sequence = watch_.begin(operation);
  const auto started = Clock::now();
  const bool message = fabric::is_message(operation.kind);
  if (membership().world->check && !message) check(operation, sequence);
  std::function<void()> finish;
  Operation adapted = operation;
  if (operation.kind == OpKind::all_reduce || operation.kind == OpKind::reduce ||
      operation.kind == OpKind::reduce_scatter) {
    detail::Adapted form = detail::adapt_reduction(std::move(adapted), std::move(memory),
                                                   membership().rank, membership().size());
    adapted = std::move(form.operation);
    memory = std::move(form.memory);
    finish = std::move(form.finish);
  }
  // Every rank must take the same of the two ways: the choice looks only at what all ranks agree
  // on.
  const bool small = operation.kind != OpKind::all_to_all &&
                     static_cast<size_t>(adapted.count) * size_of(adapted.dtype) <= kSmallBytes;
  auto progress = message ? begin_message(operation) : std::make_shared<Progress>();
  progress->memory = memory;
  if (!message && small) small_.begin(adapted, progress->running);
  const bool large = progress->running.requests.empty();
  if (large || message) {
    const std::lock_guard queue_lock(worker_->mutex);
    if (large) {
      worker_->queue.push_back({std::move(adapted), progress});
    } else {
      worker_->in_flight.push_back(progress);
    }
    start_thread();
  }
  return std::make_shared<MpiPending>(shared_from_this(), std::move(operation), sequence, started,
                                      std::move(progress), std::move(memory), std::move(finish));
}

void Worker::work() {
  std::unique_lock lock(mutex);
  while (true) {
    if (!queue.empty()) {
      const Large next = std::move(queue.front());
      queue.pop_front();
      busy = true;
      lock.unlock();
      std::exception_ptr error;
      try {
        large->run(next.operation);
      } catch (...) {
        error = std::current_exception();
      }
      lock.lock();
      busy = false;  // before anybody learns of the end and destroys the group
      const std::lock_guard progress_lock(next.progress->mutex);
      next.progress->end(error);
      continue;
    }
    if (stopping) return;
    std::erase_if(in_flight, [](const auto& item) {
      const std::lock_guard progress_lock(item->mutex);
      item->test();
      return item->done;
    });
    const auto wanted = [this] { return stopping || !queue.empty(); };
    if (in_flight.empty()) {
      arrived.wait(lock, [&] { return wanted() || !in_flight.empty(); });
    } else {
      arrived.wait_for(lock, std::chrono::microseconds(100), wanted);
    }
  }
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
