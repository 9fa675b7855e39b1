// SPDX-License-Identifier: Apache-2.0
#include "lockstep/flight/flight.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstring>
#include <filesystem>

#include "lockstep/core/clock.h"
#include "lockstep/core/dtype.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/format.h"

namespace lockstep::flight {
namespace {

template <size_t Size>
std::string text_of(const char (&text)[Size]) {
  return std::string(text, strnlen(text, Size));
}

std::string host_name() {
  char name[HOST_NAME_MAX + 1] = "";
  gethostname(name, sizeof name - 1);
  return name;
}

}  // namespace

std::string name_of(Phase phase) {
  switch (phase) {
    case Phase::starting:
      return "starting";
    case Phase::loading:
      return "loading";
    case Phase::training:
      return "training";
    case Phase::evaluating:
      return "evaluating";
    case Phase::saving:
      return "saving";
    case Phase::ended:
      break;
  }
  return "ended";
}

std::string Operation::text() const {
  const std::string data = name == "barrier" ? "" : format("{}[{}]", dtype, count);
  const std::string what = tag.empty() ? data : data.empty() ? tag : data + ", " + tag;
  const std::string with =
      message ? format(" {} rank {}", name == "send" ? "to" : "from", peer) : "";
  return format("{} #{}{} of group '{}'{}", name, number, with, group,
                what.empty() ? "" : " (" + what + ")");
}

const Operation* Flight::awaited() const {
  const Operation* longest = nullptr;
  for (const Operation& operation : operations) {
    if (!operation.running() || operation.waited == 0) continue;
    if (longest == nullptr || operation.waited < longest->waited) longest = &operation;
  }
  return longest;
}

int64_t Flight::calls_of(const std::string& group) const {
  for (const GroupUse& use : groups) {
    if (use.name == group) return use.calls;
  }
  return -1;
}

std::string Flight::doing() const {
  std::string text = step >= 0 ? format("after step {} ({})", step, name_of(phase)) : "";
  const auto seconds = [&](int64_t since) { return static_cast<double>(taken_at - since) / 1e9; };
  std::string call = "it has called no operation yet";
  if (const Operation* const waits = awaited()) {
    call = format("it waits in {} for {:.1f} s", waits->text(), seconds(waits->waited));
  } else if (const Operation* const newest = last()) {
    call = newest->running()
               ? format("it called {} {:.1f} s ago", newest->text(), seconds(newest->began))
               : format("it finished {} {:.1f} s ago", newest->text(), seconds(newest->ended));
  }
  return text.empty() ? call : text + ", " + call;
}

Flight read_page(const Page& page) {
  Flight flight{.rank = page.rank,
                .world = page.world,
                .pid = page.pid,
                .generation = page.generation,
                .host = host_name(),
                .clock_offset = page.clock_offset,
                .step = page.step.load(),
                .step_at = page.step_at.load(),
                .saved_step = page.saved_step.load(),
                .phase = page.phase.load(),
                .failure = text_of(page.failure),
                .end = {},
                .ended_at = 0,
                .stacks = text_of(page.stacks),
                .step_ns = {},
                .blocked_ns = {},
                .groups = {},
                .operations = {}};
  const uint64_t steps = page.steps.load();
  for (uint64_t i = steps > kSteps ? steps - kSteps : 0; i < steps; ++i) {
    const StepTime& time = page.step_times[i % kSteps];
    if (time.step.load() < 0) continue;
    flight.step_ns.push_back(time.nanoseconds);
    flight.blocked_ns.push_back(time.blocked);
  }
  for (const GroupSlot& group : page.groups) {
    if (group.used.load(std::memory_order_acquire) == 0) break;
    flight.groups.push_back({text_of(group.name), group.size, group.calls.load()});
  }
  for (const Entry& entry : page.entries) {
    const uint64_t ticket = entry.ticket.load(std::memory_order_acquire);
    if (ticket == 0) continue;
    Operation operation{.group = text_of(page.groups[entry.group % kGroups].name),
                        .name = text_of(entry.operation),
                        .dtype = std::string(name_of(static_cast<DType>(entry.dtype))),
                        .tag = text_of(entry.tag),
                        .ticket = ticket,
                        .number = entry.number,
                        .peer = entry.peer,
                        .message = entry.message,
                        .count = entry.count,
                        .began = entry.began,
                        .waited = entry.waited.load(),
                        .ended = entry.ended.load(),
                        .patience_ms = entry.patience_ms};
    std::atomic_thread_fence(std::memory_order_acquire);
    if (entry.ticket.load(std::memory_order_relaxed) != ticket) continue;
    flight.operations.push_back(std::move(operation));
  }
  std::sort(flight.operations.begin(), flight.operations.end(),
            [](const Operation& a, const Operation& b) { return a.ticket < b.ticket; });
  flight.taken_at =
      std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count();
  return flight;
}

// Ranks and their launcher hold pages as files without a name; a launcher holds those of all its
// ranks.
std::optional<Flight> read_process(int pid) {
  std::error_code unreadable;
  for (std::filesystem::directory_iterator file(format("/proc/{}/fd", pid), unreadable), end;
       !unreadable && file != end; file.increment(unreadable)) {
    std::error_code gone;
    if (std::filesystem::read_symlink(file->path(), gone).string().find(kPageName) ==
            std::string::npos ||
        gone)
      continue;
    const Fd fd(open(file->path().c_str(), O_RDONLY | O_CLOEXEC));
    struct stat status {};
    if (!fd.valid() || fstat(fd.get(), &status) != 0 ||
        status.st_size != static_cast<off_t>(sizeof(Page)))
      continue;
    void* const memory = mmap(nullptr, sizeof(Page), PROT_READ, MAP_SHARED, fd.get(), 0);
    if (memory == MAP_FAILED) continue;
    const auto* const page = static_cast<const Page*>(memory);
    std::optional<Flight> flight;
    if (page->magic.load(std::memory_order_acquire) == kMagic && page->pid == pid)
      flight = read_page(*page);
    munmap(memory, sizeof(Page));
    if (flight) return flight;
  }
  return std::nullopt;
}

}  // namespace lockstep::flight
