// SPDX-License-Identifier: Apache-2.0
// The signal handler takes no lock and allocates nothing. It reads a list of ranges whose nodes are
// never freed, and counts itself as a reader; a range that goes waits until there is none.
#include "lockstep/parallel/intercept/fault_report.h"

#include <unistd.h>
#include <csignal>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <string_view>
#include <thread>

#include "lockstep/parallel/intercept/interception.h"

namespace lockstep::parallel::detail {

struct FaultRange {
  uintptr_t begin, end;
  FaultReport::Text text;
};

namespace {

// Of the process, as signal handlers are. Nothing here is destroyed: a fault may come at any time.
struct RangeNode {
  std::atomic<const FaultRange*> range = nullptr;  // null: free
  RangeNode* next = nullptr;
};
std::atomic<RangeNode*> first_range = nullptr;
std::atomic<int> num_readers = 0;
std::mutex range_mutex;  // of those that add and remove
struct sigaction previous_action {};

// As much of a message as fits. A name may be longer than all of it.
class Line {
 public:
  void add(std::string_view text) {
    const size_t count = std::min(text.size(), bytes_.size() - size_);
    std::memcpy(bytes_.data() + size_, text.data(), count);
    size_ += count;
  }
  void write() const {
    for (size_t done = 0; done < size_;) {
      const ssize_t count = ::write(STDERR_FILENO, bytes_.data() + done, size_ - done);
      if (count < 0 && errno == EINTR) continue;
      if (count <= 0) return;
      done += static_cast<size_t>(count);
    }
  }

 private:
  std::array<char, 1024> bytes_;
  size_t size_ = 0;
};

void report_fault_at(uintptr_t address) {
  ++num_readers;
  for (const RangeNode* node = first_range; node != nullptr; node = node->next) {
    const FaultRange* const range = node->range;
    if (range == nullptr || address < range->begin || address >= range->end) continue;
    Line line;
    line.add(range->text.before);
    if (range->text.names)
      line.add(range->text.names->at(static_cast<int64_t>(address - range->begin)));
    line.add(range->text.after);
    line.write();
    break;
  }
  --num_readers;
}

void pass_fault_on(int signal, siginfo_t* info, void* context) {
  if ((previous_action.sa_flags & SA_SIGINFO) != 0)
    return previous_action.sa_sigaction(signal, info, context);
  const auto handler = previous_action.sa_handler;
  const bool was_sent = info->si_code <= 0;  // by a process, so that no instruction faults again
  if (handler == SIG_IGN && was_sent) return;
  if (handler != SIG_IGN && handler != SIG_DFL) return handler(signal);
  // The instruction faults again, now without a handler: the core dump shows it.
  sigaction(signal, &previous_action, nullptr);
  if (was_sent) raise(signal);
}

void on_fault(int signal, siginfo_t* info, void* context) {
  const int error = errno;
  if (info->si_code > 0) report_fault_at(reinterpret_cast<uintptr_t>(info->si_addr));
  errno = error;
  pass_fault_on(signal, info, context);
}

void install_fault_handler() {
  if (!is_allowed(Interception::faults)) return;
  sigaction(SIGSEGV, nullptr, &previous_action);
  // Whatever the earlier handler asked for (an own stack, a mask) it gets.
  struct sigaction action = previous_action;
  action.sa_flags |= SA_SIGINFO | SA_ONSTACK;
  action.sa_sigaction = &on_fault;
  sigaction(SIGSEGV, &action, nullptr);
}

}  // namespace

FaultReport::FaultReport(const void* begin, size_t bytes, Text text) {
  static std::once_flag installed;
  std::call_once(installed, &install_fault_handler);
  const auto start = reinterpret_cast<uintptr_t>(begin);
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t size = (bytes + page - 1) / page * page;
  range_ = std::make_shared<FaultRange>(FaultRange{start, start + size, std::move(text)});
  const std::lock_guard lock(range_mutex);
  RangeNode* node = first_range;
  while (node != nullptr && node->range != nullptr) node = node->next;
  if (node == nullptr) {
    node = new RangeNode{.next = first_range};
    node->range = range_.get();
    first_range = node;
  } else {
    node->range = range_.get();
  }
}

FaultReport::~FaultReport() {
  if (!range_) return;
  const std::lock_guard lock(range_mutex);
  for (RangeNode* node = first_range; node != nullptr; node = node->next) {
    if (node->range == range_.get()) node->range = nullptr;
  }
  while (num_readers > 0) std::this_thread::yield();
}

}  // namespace lockstep::parallel::detail
