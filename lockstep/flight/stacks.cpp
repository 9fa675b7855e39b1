// SPDX-License-Identifier: Apache-2.0
#include "lockstep/flight/stacks.h"

#include <cxxabi.h>
#include <dirent.h>
#include <dlfcn.h>
#include <execinfo.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/core/clock.h"
#include "lockstep/core/format.h"
#include "lockstep/flight/recorder.h"

namespace lockstep::flight {
namespace {

constexpr int kFrames = 48;
constexpr int kHandlerFrames = 2;  // the handler itself, and what called it
constexpr size_t kShownFrames = 24;
constexpr milliseconds kPatience{100};  // for one thread

// Of the one thread that is asked at a time.
void* frames[kFrames];
std::atomic<int> depth{0};
std::atomic<pid_t> target{0};
std::atomic<Page*> own_page{nullptr};
std::atomic<bool> dump_wanted{false};

int stack_signal() { return SIGRTMIN + 7; }

void pause_a_moment() {
  const timespec wait{0, 200'000};
  nanosleep(&wait, nullptr);
}

void on_signal(int) {
  const int before = errno;
  if (target.load() == static_cast<pid_t>(syscall(SYS_gettid))) {
    depth.store(backtrace(frames, kFrames));
    target.store(0);
  }
  errno = before;
}

void wait_on(std::atomic<uint32_t>& word, uint32_t value) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, value, nullptr, nullptr, 0);
}

std::string name_of_frame(void* address) {
  Dl_info info{};
  if (dladdr(address, &info) == 0) return format("{}", address);
  const char* const slash = info.dli_fname == nullptr ? nullptr : std::strrchr(info.dli_fname, '/');
  const char* const file = slash == nullptr ? info.dli_fname : slash + 1;
  if (info.dli_sname == nullptr) {
    const auto offset =
        static_cast<const char*>(address) - static_cast<const char*>(info.dli_fbase);
    return format("{}+{:#x}", file, static_cast<size_t>(offset));
  }
  int status = 0;
  char* const readable = abi::__cxa_demangle(info.dli_sname, nullptr, nullptr, &status);
  std::string name = readable == nullptr ? info.dli_sname : readable;
  std::free(readable);
  if (name.size() > 120) name = name.substr(0, 117) + "...";
  return name;
}

std::string stack_of(pid_t thread) {
  depth = 0;
  target = thread;
  if (syscall(SYS_tgkill, getpid(), thread, stack_signal()) != 0) return {};
  for (const Deadline deadline(kPatience); target.load() != 0 && !deadline.passed();)
    pause_a_moment();
  if (target.exchange(0) != 0)
    return "    (does not answer: it blocks signals, or is in the kernel)\n";
  std::string text;
  const auto end =
      std::min<size_t>(static_cast<size_t>(depth.load()), kHandlerFrames + kShownFrames);
  for (size_t i = kHandlerFrames; i < end; ++i) text += "    " + name_of_frame(frames[i]) + "\n";
  return text;
}

std::string thread_name(pid_t thread) {
  std::ifstream file(format("/proc/self/task/{}/comm", thread));
  std::string name;
  std::getline(file, name);
  return name;
}

// Threads with the same stack, as those of a pool, are shown once.
std::string all_stacks(pid_t except) {
  std::vector<pid_t> threads;
  if (DIR* const folder = opendir("/proc/self/task")) {
    while (const dirent* const item = readdir(folder)) {
      const int thread = std::atoi(item->d_name);
      if (thread > 0 && thread != except) threads.push_back(thread);
    }
    closedir(folder);
  }
  std::sort(threads.begin(), threads.end());
  std::vector<std::pair<std::string, std::vector<pid_t>>> stacks;
  for (const pid_t thread : threads) {
    const std::string stack = stack_of(thread);
    const auto same =
        std::find_if(stacks.begin(), stacks.end(), [&](const auto& s) { return s.first == stack; });
    if (same != stacks.end()) {
      same->second.push_back(thread);
    } else {
      stacks.push_back({stack, {thread}});
    }
  }
  std::string text;
  for (const auto& [stack, of] : stacks) {
    text += format("  thread{} {} ({}):\n{}", of.size() > 1 ? "s" : "", join(of),
                   thread_name(of.front()), stack);
  }
  return text;
}

void answer(Page& page) {
  pthread_setname_np(pthread_self(), "flight");
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
  const auto self = static_cast<pid_t>(syscall(SYS_gettid));
  while (true) {
    const uint32_t asked = page.asked.load();
    if (asked == page.answered.load()) {
      wait_on(page.asked, asked);
      continue;
    }
    const std::string text = all_stacks(self);
    const size_t size = std::min(text.size(), kStackBytes - 1);
    std::memcpy(page.stacks, text.data(), size);
    page.stacks[size] = '\0';
    page.answered.store(asked);
    if (dump_wanted.exchange(false)) dump_own();
  }
}

}  // namespace

void answer_requests(Page& page) {
  void* first[2];
  backtrace(first, 2);  // loads what it needs, which a signal handler must not
  struct sigaction action {};
  action.sa_handler = on_signal;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  if (sigaction(stack_signal(), &action, nullptr) != 0) return;
  page.answers = true;
  own_page = &page;
  std::thread([&page] { answer(page); }).detach();  // as long as the process; it holds nothing
}

void dump_on_signal(int signal) {
  struct sigaction action {};
  action.sa_handler = [](int) {
    dump_wanted = true;
    if (Page* const page = own_page.load()) ask_for_stacks(*page);
  };
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  sigaction(signal, &action, nullptr);
}

void ask_for_stacks(Page& page) {
  page.asked.fetch_add(1);
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&page.asked), FUTEX_WAKE, INT_MAX, nullptr,
          nullptr, 0);
}

bool has_answered(const Page& page) {
  return page.answers.load() && page.answered.load() == page.asked.load();
}

}  // namespace lockstep::flight
