// SPDX-License-Identifier: Apache-2.0
#include "lockstep/flight/recorder.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <mutex>

#include "lockstep/core/log.h"
#include "lockstep/flight/dump.h"
#include "lockstep/flight/flight.h"
#include "lockstep/flight/sign_fault.h"
#include "lockstep/flight/stacks.h"

namespace lockstep::flight {
namespace {

std::atomic<Page*> current{nullptr};
bool watched = false;
std::mutex mutex;  // of what follows
std::string folder;

SignFault sign_fault;

void count_sign(Page& page) {
  page.signs.fetch_add(1, std::memory_order_relaxed);
  sign_fault.count(page.step.load(std::memory_order_relaxed));
}

int64_t to_ns(Clock::time_point time) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
}

int64_t now_ns() { return to_ns(Clock::now()); }

template <size_t Size>
void copy_text(char (&to)[Size], std::string_view text) {
  const size_t size = std::min(text.size(), Size - 1);
  std::memcpy(to, text.data(), size);
  to[size] = '\0';
}

// The launcher's; null where there is none, or where it is another version's.
Page* inherited() {
  const char* const text = std::getenv(kVariable);
  if (text == nullptr) return nullptr;
  const int fd = std::atoi(text);
  struct stat status {};
  if (fstat(fd, &status) != 0 || status.st_size != static_cast<off_t>(sizeof(Page))) return nullptr;
  void* const memory = mmap(nullptr, sizeof(Page), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  return memory == MAP_FAILED ? nullptr : static_cast<Page*>(memory);
}

// A file without a name, which stays open, so that read_process() finds it; plain memory where
// there can be none.
Page* own() {
  const int fd = memfd_create(kPageName, MFD_CLOEXEC);
  const bool shared = fd >= 0 && ftruncate(fd, sizeof(Page)) == 0;
  void* const memory = mmap(nullptr, sizeof(Page), PROT_READ | PROT_WRITE,
                            shared ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS, shared ? fd : -1, 0);
  return memory == MAP_FAILED ? nullptr : static_cast<Page*>(memory);
}

Entry* entry_of(Page& page, uint64_t ticket) {
  if (ticket == 0) return nullptr;
  Entry& entry = page.entries[(ticket - 1) % kEntries];
  return entry.ticket.load(std::memory_order_relaxed) == ticket ? &entry : nullptr;
}

// Messages of one direction between two ranks of a group, which are few: counted by looking back.
uint32_t next_message(const Page& page, const Call& call, uint64_t ticket) {
  for (uint64_t before = ticket - 1; before > 0 && before + kEntries > ticket; --before) {
    const Entry& entry = page.entries[(before - 1) % kEntries];
    if (entry.message && entry.group == call.group && entry.peer == call.peer &&
        call.operation == entry.operation)
      return entry.number + 1;
  }
  return 1;
}

}  // namespace

void start(int rank, int world) {
  const std::lock_guard lock(mutex);
  if (current.load() != nullptr) return;
  Page* page = inherited();
  watched = page != nullptr;
  if (page == nullptr) page = own();
  if (page == nullptr) return;
  page->rank = rank;
  page->world = world;
  page->pid = getpid();
  const char* const generation = std::getenv("LOCKSTEP_GENERATION");
  page->generation = generation == nullptr ? 0 : static_cast<uint32_t>(std::atoi(generation));
  timespec wall{};
  clock_gettime(CLOCK_REALTIME, &wall);
  page->clock_offset = wall.tv_sec * 1'000'000'000 + wall.tv_nsec - now_ns();
  page->step = -1;
  page->saved_step = -1;
  page->magic.store(kMagic, std::memory_order_release);
  sign_fault.from_environment(rank);
  current.store(page);
  if (const char* const given = std::getenv(kFolderVariable)) folder = given;
  answer_requests(*page);
}

bool started() { return current.load(std::memory_order_relaxed) != nullptr; }
bool is_watched() { return started() && watched; }
const Page* page() { return current.load(); }

uint16_t add_group(const std::string& name, int size) {
  Page* const page = current.load();
  if (page == nullptr) return 0;
  const std::lock_guard lock(mutex);
  size_t slot = 0;
  for (; slot + 1 < kGroups && page->groups[slot].used.load() != 0; ++slot) {
    if (name.compare(0, sizeof GroupSlot{}.name - 1, page->groups[slot].name) == 0)
      return static_cast<uint16_t>(slot);
  }
  GroupSlot& group = page->groups[slot];  // the last one is shared by all that find no other
  group.size = size;
  copy_text(group.name, slot + 1 == kGroups ? "(others)" : name);
  group.used.store(1, std::memory_order_release);
  return static_cast<uint16_t>(slot);
}

uint64_t begin(const Call& call) {
  Page* const page = current.load(std::memory_order_relaxed);
  if (page == nullptr) return 0;
  const uint64_t ticket = page->next.fetch_add(1, std::memory_order_relaxed) + 1;
  Entry& entry = page->entries[(ticket - 1) % kEntries];
  entry.ticket.store(0, std::memory_order_release);
  entry.began = now_ns();
  entry.waited.store(call.on_device ? entry.began : 0, std::memory_order_relaxed);
  entry.ended.store(0, std::memory_order_relaxed);
  entry.count = call.count;
  entry.peer = call.peer;
  entry.patience_ms = call.patience_ms;
  entry.group = call.group;
  entry.dtype = static_cast<uint8_t>(call.dtype);
  entry.message = call.message;
  copy_text(entry.operation, call.operation);
  copy_text(entry.tag, call.tag);
  entry.number = call.message
                     ? next_message(*page, call, ticket)
                     : page->groups[call.group].calls.fetch_add(1, std::memory_order_relaxed) + 1;
  entry.ticket.store(ticket, std::memory_order_release);
  count_sign(*page);
  return ticket;
}

void wait(uint64_t ticket) {
  Page* const page = current.load(std::memory_order_relaxed);
  Entry* const entry = page == nullptr ? nullptr : entry_of(*page, ticket);
  if (entry == nullptr || entry->ended.load(std::memory_order_relaxed) != 0) return;
  entry->waited.store(now_ns(), std::memory_order_relaxed);
}

void ended_in_call(uint64_t ticket) {
  Page* const page = current.load(std::memory_order_relaxed);
  Entry* const entry = page == nullptr ? nullptr : entry_of(*page, ticket);
  if (entry != nullptr) entry->waited.store(entry->began, std::memory_order_relaxed);
}

void end(uint64_t ticket, Clock::time_point at) {
  Page* const page = current.load(std::memory_order_relaxed);
  Entry* const entry = page == nullptr ? nullptr : entry_of(*page, ticket);
  if (entry == nullptr || entry->ended.load(std::memory_order_relaxed) != 0) return;
  entry->ended.store(to_ns(at), std::memory_order_relaxed);
  count_sign(*page);
}

void fail(std::string_view what) {
  Page* const page = current.load();
  if (page == nullptr) return;
  {
    const std::lock_guard lock(mutex);
    if (page->failure[0] != '\0') return;
    copy_text(page->failure, what.substr(0, what.find('\n')));
  }
  dump_own();
}

void set_step(int64_t step, int64_t nanoseconds, int64_t blocked) {
  Page* const page = current.load(std::memory_order_relaxed);
  if (page == nullptr) return;
  StepTime& time = page->step_times[page->steps.load(std::memory_order_relaxed) % kSteps];
  time.step.store(-1, std::memory_order_release);
  time.nanoseconds = nanoseconds;
  time.blocked = blocked;
  time.step.store(step, std::memory_order_release);
  page->steps.fetch_add(1, std::memory_order_release);
  page->step_at.store(now_ns(), std::memory_order_relaxed);
  page->step.store(step, std::memory_order_release);
  count_sign(*page);
}

void set_saved(int64_t step) {
  if (Page* const page = current.load()) page->saved_step.store(step);
}

void set_phase(Phase phase) {
  if (Page* const page = current.load(std::memory_order_relaxed)) {
    page->phase.store(phase, std::memory_order_relaxed);
    count_sign(*page);
  }
}

void show_life() {
  if (Page* const page = current.load(std::memory_order_relaxed)) count_sign(*page);
}

void set_folder(const std::string& where) {
  const std::lock_guard lock(mutex);
  folder = where;
}

void dump_own() {
  const Page* const page = current.load();
  std::string where;
  {
    const std::lock_guard lock(mutex);
    if (page == nullptr || watched || folder.empty()) return;
    where = folder;
  }
  try {
    write_dump(where, page->rank, read_page(*page));
  } catch (const std::exception& failure) {
    log::warn(failure.what());
  }
}

}  // namespace lockstep::flight
