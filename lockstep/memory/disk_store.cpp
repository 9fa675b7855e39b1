// SPDX-License-Identifier: Apache-2.0
#include "lockstep/memory/disk_store.h"

#include <signal.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <stop_token>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/trace.h"
#include "lockstep/memory/disk_file.h"
#include "lockstep/memory/file_space.h"
#include "lockstep/memory/read_buffers.h"

namespace lockstep::memory {
namespace {

// On this thread a limit on the size of files is an error of the call, like a full disk.
void block_size_signal() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGXFSZ);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
}

}  // namespace

struct DiskStore::Entry {
  enum class Write { waits, runs, done };
  enum class Read { none, waits, runs, done };

  bool in_memory() const { return owner != nullptr || loaded != nullptr; }

  std::span<const std::byte> bytes;
  std::shared_ptr<const void> owner;        // until it is written
  std::shared_ptr<const std::byte> loaded;  // from the end of a read to get()
  Write write = Write::waits;
  Read read = Read::none;
  size_t offset = 0;     // from the beginning of its write
  bool dropped = false;  // while it is being written or read
};

struct DiskStore::Shared {
  using Entries = std::deque<std::shared_ptr<Entry>>;
  using Lock = std::unique_lock<std::mutex>;

  Shared(const std::string& folder, const DiskStoreOptions& given)
      : max_waiting(std::max<size_t>(given.max_waiting, 1)),
        max_ahead(given.max_ahead),
        file(folder) {}

  // Changes an entry, and counts what that means for memory.
  template <class Change>
  void change(Entry& entry, Change apply) {
    if (entry.in_memory()) memory -= entry.bytes.size();
    apply();
    if (entry.in_memory()) memory += entry.bytes.size();
    stats.peak_memory = std::max(stats.peak_memory, memory);
  }
  void throw_failure() const {
    if (failure) std::rethrow_exception(failure);
  }
  void forget_oldest_ahead();
  void drop(const std::shared_ptr<Entry>& entry);
  void run(const std::stop_token& stop);
  void run_write(Lock& lock);
  void run_read(Lock& lock);
  void write_file(const Entry& entry);
  void read_file(const Entry& entry, std::span<std::byte> bytes);

  const size_t max_waiting, max_ahead;
  detail::DiskFile file;

  std::mutex mutex;
  std::condition_variable_any work;  // for the thread
  std::condition_variable done;      // for put() and get()
  Entries writes, reads;             // that wait
  Entries ahead;                     // asked for by prefetch(), and not by get() yet
  size_t waiting = 0;                // writes that wait or run
  size_t memory = 0;
  detail::FileSpace space;
  const std::shared_ptr<detail::ReadBuffers> buffers = std::make_shared<detail::ReadBuffers>();
  DiskStoreStats stats;
  std::exception_ptr failure;
};

void DiskStore::Shared::write_file(const Entry& entry) {
  const trace::Span span("disk", "disk write",
                         trace::enabled() ? format("\"bytes\":{}", entry.bytes.size()) : "");
  file.write(entry.bytes, entry.offset);
}

void DiskStore::Shared::read_file(const Entry& entry, std::span<std::byte> bytes) {
  const trace::Span span("disk", "disk read",
                         trace::enabled() ? format("\"bytes\":{}", bytes.size()) : "");
  file.read(bytes, entry.offset);
}

void DiskStore::Shared::run_write(Lock& lock) {
  const std::shared_ptr<Entry> entry = std::move(writes.front());
  writes.pop_front();
  entry->write = Entry::Write::runs;
  entry->offset = space.take(entry->bytes.size());
  stats.file_size = std::max(stats.file_size, space.end());
  lock.unlock();
  write_file(*entry);
  lock.lock();
  entry->write = Entry::Write::done;
  stats.bytes_written += entry->bytes.size();
  --waiting;
  std::shared_ptr<const void> written;  // freed when the lock is not held
  change(*entry, [&] { written = std::move(entry->owner); });
  if (entry->dropped) space.give_back(entry->offset);
  lock.unlock();
  written.reset();
  lock.lock();
}

void DiskStore::Shared::run_read(Lock& lock) {
  const std::shared_ptr<Entry> entry = std::move(reads.front());
  reads.pop_front();
  entry->read = Entry::Read::runs;
  lock.unlock();
  const size_t size = entry->bytes.size();
  std::shared_ptr<std::byte> buffer = buffers->take(detail::DiskFile::rounded(size));
  read_file(*entry, {buffer.get(), size});
  lock.lock();
  stats.bytes_read += size;
  if (entry->dropped) {
    space.give_back(entry->offset);
    return;
  }
  entry->read = Entry::Read::done;
  change(*entry, [&] { entry->loaded = std::move(buffer); });
}

// Reads first: a caller may be waiting for them.
void DiskStore::Shared::run(const std::stop_token& stop) {
  Lock lock(mutex);
  const auto has_work = [this] { return !reads.empty() || !writes.empty(); };
  while (work.wait(lock, stop, has_work) && !stop.stop_requested()) {
    try {
      if (!reads.empty()) {
        run_read(lock);
      } else {
        run_write(lock);
      }
    } catch (...) {
      if (!lock.owns_lock()) lock.lock();
      if (!failure) failure = std::current_exception();
      reads.clear();
      writes.clear();
      file.discard();  // no caller will ask for it
    }
    done.notify_all();
  }
}

void DiskStore::Shared::forget_oldest_ahead() {
  const std::shared_ptr<Entry> entry = std::move(ahead.front());
  ahead.pop_front();
  if (entry->read == Entry::Read::runs) return;  // will be there, for once one too many
  if (entry->read == Entry::Read::waits) std::erase(reads, entry);
  entry->read = Entry::Read::none;
  change(*entry, [&] { entry->loaded.reset(); });
}

void DiskStore::Shared::drop(const std::shared_ptr<Entry>& entry) {
  std::shared_ptr<const void> owner, loaded;  // freed when the lock is not held
  {
    const Lock lock(mutex);
    std::erase(ahead, entry);
    std::erase(reads, entry);
    if (entry->write == Entry::Write::waits) waiting -= std::erase(writes, entry);
    entry->dropped = true;
    // What the thread has in its hands it puts away itself.
    const bool runs = entry->write == Entry::Write::runs || entry->read == Entry::Read::runs;
    change(*entry, [&] {
      loaded = std::move(entry->loaded);
      if (!runs) owner = std::move(entry->owner);
    });
    if (!runs && entry->write == Entry::Write::done) space.give_back(entry->offset);
  }
  done.notify_all();  // there is room for another
}

DiskStore::DiskStore(const std::string& folder, DiskStoreOptions options)
    : shared_(std::make_shared<Shared>(folder, options)),
      thread_([shared = shared_, rank = options.rank](const std::stop_token& stop) {
        block_size_signal();
        trace::name_thread(rank, "disk");
        shared->run(stop);
      }) {}

DiskStore::~DiskStore() = default;

DiskStore::Block DiskStore::put(std::span<const std::byte> bytes,
                                std::shared_ptr<const void> owner) {
  check(owner != nullptr, "what is put on disk has an owner");
  const auto entry = std::make_shared<Entry>();
  {
    Shared::Lock lock(shared_->mutex);
    if (shared_->waiting >= shared_->max_waiting && !shared_->failure) {
      const trace::Span span("disk", "wait for disk write");
      shared_->done.wait(
          lock, [&] { return shared_->waiting < shared_->max_waiting || shared_->failure; });
    }
    shared_->throw_failure();
    entry->bytes = bytes;
    shared_->change(*entry, [&] { entry->owner = std::move(owner); });
    shared_->writes.push_back(entry);
    ++shared_->waiting;
  }
  shared_->work.notify_one();
  return {shared_, entry};
}

void DiskStore::prefetch(const Block& block) {
  Entry& entry = *block.entry_;
  {
    const Shared::Lock lock(shared_->mutex);
    if (entry.read != Entry::Read::none || shared_->failure) return;
    if (entry.owner != nullptr) {  // not gone yet: it stays when it is written
      entry.loaded = {entry.owner, entry.bytes.data()};
      entry.read = Entry::Read::done;
    } else {
      entry.read = Entry::Read::waits;
      shared_->reads.push_back(block.entry_);
    }
    shared_->ahead.push_back(block.entry_);
    if (shared_->ahead.size() > shared_->max_ahead) shared_->forget_oldest_ahead();
  }
  shared_->work.notify_one();
}

std::shared_ptr<const std::byte> DiskStore::get(const Block& block) {
  const std::shared_ptr<Entry>& entry = block.entry_;
  Shared::Lock lock(shared_->mutex);
  shared_->throw_failure();
  if (entry->read == Entry::Read::none && entry->owner != nullptr) {
    ++shared_->stats.from_memory;
    return {entry->owner, entry->bytes.data()};
  }
  if (entry->read == Entry::Read::none) {
    ++shared_->stats.late;
  } else {
    ++shared_->stats.ahead;
    std::erase(shared_->ahead, entry);
  }
  while (entry->read != Entry::Read::done) {
    if (entry->read == Entry::Read::none) {
      entry->read = Entry::Read::waits;
      shared_->reads.push_front(entry);
      shared_->work.notify_one();
    }
    const trace::Span span("disk", "wait for disk read");
    // None again: another thread wanted the same block and has taken it.
    shared_->done.wait(lock, [&] {
      return entry->read == Entry::Read::done || entry->read == Entry::Read::none ||
             shared_->failure;
    });
    shared_->throw_failure();
  }
  std::shared_ptr<const std::byte> bytes;
  shared_->change(*entry, [&] { bytes = std::move(entry->loaded); });
  entry->read = Entry::Read::none;
  shared_->done.notify_all();
  return bytes;
}

DiskStoreStats DiskStore::stats() const {
  const Shared::Lock lock(shared_->mutex);
  DiskStoreStats stats = shared_->stats;
  stats.direct = shared_->file.direct();
  return stats;
}

DiskStore::Block& DiskStore::Block::operator=(Block&& other) noexcept {
  std::swap(shared_, other.shared_);
  std::swap(entry_, other.entry_);
  return *this;
}

DiskStore::Block::~Block() {
  if (entry_ != nullptr) shared_->drop(entry_);
}

size_t DiskStore::Block::size() const { return entry_->bytes.size(); }

}  // namespace lockstep::memory
