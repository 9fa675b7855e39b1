// SPDX-License-Identifier: Apache-2.0
#include "lockstep/launch/processes/process.h"

#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::launch {
namespace {

constexpr milliseconds kExecTime{60'000};
constexpr milliseconds kReapTime{2'000};

// ---- in the child, between fork and exec: only system calls, nothing that allocates or locks ----

struct ChildPlan {
  char* const* argv;
  char* const* environment;
  const Command* command;
  int report_fd;
  pid_t parent;
};

void write_text(int fd, const char* text, size_t size) {
  [[maybe_unused]] const ssize_t written = ::write(fd, text, size);
}

// Decimal digits, without a terminating zero; returns how many.
size_t digits(long number, char* text) {
  char reversed[24];
  size_t count = 0;
  do {
    reversed[count++] = static_cast<char>('0' + number % 10);
    number /= 10;
  } while (number > 0);
  for (size_t i = 0; i < count; ++i) text[i] = reversed[count - 1 - i];
  return count;
}

bool traced() {
  char status[4096];
  const int fd = open("/proc/self/status", O_RDONLY | O_CLOEXEC);
  const ssize_t size = fd < 0 ? -1 : read(fd, status, sizeof status);
  close(fd);
  constexpr char kField[] = "TracerPid:\t";
  for (ssize_t i = 0; i + static_cast<ssize_t>(sizeof kField) <= size; ++i) {
    if (memcmp(status + i, kField, sizeof kField - 1) == 0)
      return status[i + sizeof kField - 1] != '0';
  }
  return false;
}

// dup2 that also works when source and target are the same number.
void place(int from, int to) {
  if (from != to) {
    dup2(from, to);
  } else {
    fcntl(to, F_SETFD, 0);
  }
}

// Without allocating.
void bind_to(const std::vector<int>& cores) {
  constexpr int kMaxCores = 8192;
  unsigned long mask[kMaxCores / (8 * sizeof(unsigned long))] = {};
  auto* const set = reinterpret_cast<cpu_set_t*>(mask);
  for (const int core : cores) {
    if (core < kMaxCores) CPU_SET_S(static_cast<size_t>(core), sizeof mask, set);
  }
  sched_setaffinity(0, sizeof mask, set);
}

}  // namespace

void wait_for_debugger(int rank) {
  char text[128];
  size_t size = 0;
  const auto add = [&](const char* part) {
    while (*part != '\0') text[size++] = *part++;
  };
  add("rank ");
  size += digits(rank, text + size);
  add(" waits for a debugger: gdb -p ");
  size += digits(getpid(), text + size);
  add("\n");
  write_text(STDERR_FILENO, text, size);
  while (!traced()) {
    const timespec pause{0, 50'000'000};
    nanosleep(&pause, nullptr);
  }
}

void set_up_child(const Command& command, pid_t parent) {
  if (command.survives) {
    setsid();
  } else {
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(127);  // it died before the line above
  }
  if (command.guard >= 0) {
    char line[32] = "+";
    size_t size = 1 + digits(getpid(), line + 1);
    line[size++] = '\n';
    write_text(command.guard, line, size);
  }
  for (int number = 1; number < NSIG; ++number)
    signal(number, command.survives ? SIG_IGN : SIG_DFL);
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);

  const int null = open("/dev/null", O_RDWR | O_CLOEXEC);
  place(command.in >= 0 ? command.in : null, STDIN_FILENO);
  place(command.out >= 0 ? command.out : null, STDOUT_FILENO);
  place(command.err >= 0 ? command.err : null, STDERR_FILENO);
  if (null > STDERR_FILENO) close(null);
  for (const int fd : command.keep) fcntl(fd, F_SETFD, 0);
  if (!command.cores.empty()) bind_to(command.cores);
}

namespace {

[[noreturn]] void run_child(const ChildPlan& plan) {
  const Command& command = *plan.command;
  set_up_child(command, plan.parent);
  if (command.hang_rank >= 0) {
    close(plan.report_fd);
    close(command.guard);
    wait_for_debugger(command.hang_rank);
  }
  execvpe(plan.argv[0], plan.argv, plan.environment);
  const int failure = errno;
  if (command.hang_rank >= 0) {
    constexpr char kText[] = "the program could not be started\n";
    write_text(STDERR_FILENO, kText, sizeof kText - 1);
  } else {
    write_text(plan.report_fd, reinterpret_cast<const char*>(&failure), sizeof failure);
  }
  _exit(127);
}

// ---- in the parent ----

std::vector<char*> pointers(const std::vector<std::string>& strings) {
  std::vector<char*> result;
  for (const std::string& text : strings) result.push_back(const_cast<char*>(text.c_str()));
  result.push_back(nullptr);
  return result;
}

}  // namespace

std::string signal_name(int signal) {
  const char* const name = sigabbrev_np(signal);
  return name != nullptr ? std::string("SIG") + name : format("signal {}", signal);
}

std::string ExitStatus::text() const {
  if (signal != 0) return format("was killed by {} (signal {})", signal_name(signal), signal);
  return format("exited with code {}", code);
}

Process::Process(const Command& command) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) throw SystemError("pipe", errno);
  const Fd report(ends[0]);
  Fd report_in(ends[1]);

  const auto argv = pointers(command.argv), environment = pointers(command.environment);
  const ChildPlan plan{argv.data(), environment.data(), &command, report_in.get(), getpid()};
  pid_ = fork();
  if (pid_ == 0) run_child(plan);
  const int fork_failure = errno;
  if (pid_ < 0) throw SystemError("fork", fork_failure);
  // Both sides do it, so that the group exists before it is signalled. Fails once the
  // child has exec'd.
  if (!command.survives) setpgid(pid_, pid_);

  report_in = Fd();
  int failure = 0;
  bool failed = false;
  try {
    failed = read_full(report, std::as_writable_bytes(std::span(&failure, 1)), Deadline(kExecTime));
    pidfd_ = Fd(static_cast<int>(syscall(SYS_pidfd_open, pid_, 0)));
    if (!failed && !pidfd_.valid()) throw SystemError("pidfd_open", errno);
  } catch (...) {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    throw;
  }
  if (failed) {
    waitpid(pid_, nullptr, 0);
    throw SystemError(format("cannot start '{}'", command.argv[0]), failure);
  }
}

Process::Process(pid_t child)
    : pid_(child), pidfd_(static_cast<int>(syscall(SYS_pidfd_open, child, 0))) {
  if (!pidfd_.valid()) throw SystemError("pidfd_open", errno);
}

Process::Process(Process&& other) noexcept
    : pid_(std::exchange(other.pid_, -1)), pidfd_(std::move(other.pidfd_)) {}

Process::~Process() {
  if (pid_ < 0) return;
  signal_group(SIGKILL);
  // Bounded: a process stuck in the kernel cannot be waited for.
  pollfd item{pidfd_.get(), POLLIN, 0};
  const Deadline deadline(kReapTime);
  while (poll(&item, 1, static_cast<int>(deadline.left().count())) < 0 && errno == EINTR) {
  }
  waitpid(pid_, nullptr, WNOHANG);
}

void Process::signal_group(int signal) const {
  if (pid_ > 0) kill(-pid_, signal);
}

std::optional<ExitStatus> Process::status() const {
  siginfo_t info{};
  if (waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOHANG | WNOWAIT) != 0) {
    throw SystemError("waitid", errno);
  }
  if (info.si_pid == 0) return std::nullopt;
  if (info.si_code == CLD_EXITED) return ExitStatus{info.si_status, 0};
  return ExitStatus{0, info.si_status};
}

std::optional<int> Process::take_stop() const {
  siginfo_t info{};
  if (waitid(P_PID, static_cast<id_t>(pid_), &info, WSTOPPED | WCONTINUED | WNOHANG) != 0 ||
      info.si_pid == 0)
    return std::nullopt;
  return info.si_code == CLD_CONTINUED ? 0 : info.si_status;
}

}  // namespace lockstep::launch
