// SPDX-License-Identifier: Apache-2.0
#include "lockstep/launch/processes/fork_server.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <ctime>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::launch {
namespace {

constexpr const char* kVariable = "LOCKSTEP_FORK_SERVER";
constexpr milliseconds kStartTime{60'000};  // loading libraries from a slow disk
constexpr size_t kMaxFds = 16;

// What the copy needs to know; environment and numbers follow, in memory that is sent along.
struct Request {
  pid_t launcher;
  int32_t hang_rank;
  bool has[4];  // in, out, err, guard
  uint32_t keeps, cores, environment;
};

struct Received {
  Request request{};
  std::vector<int> keeps, cores;
  std::vector<std::string> environment;
  std::vector<int> fds;  // in the order in which they were sent, the memory first
};

void append(std::string& to, const void* data, size_t size) {
  to.append(static_cast<const char*>(data), size);
}

// ---- in the launcher ----

void send_request(int socket, const Command& command) {
  Request request{getpid(),
                  command.hang_rank,
                  {command.in >= 0, command.out >= 0, command.err >= 0, command.guard >= 0},
                  static_cast<uint32_t>(command.keep.size()),
                  static_cast<uint32_t>(command.cores.size()),
                  static_cast<uint32_t>(command.environment.size())};
  std::string payload;
  append(payload, &request, sizeof request);
  append(payload, command.keep.data(), command.keep.size() * sizeof(int));
  append(payload, command.cores.data(), command.cores.size() * sizeof(int));
  for (const std::string& entry : command.environment)
    append(payload, entry.c_str(), entry.size() + 1);
  const Fd memory(memfd_create("lockstep-fork", MFD_CLOEXEC));
  if (!memory.valid()) throw SystemError("memfd_create", errno);
  write_full(memory, std::as_bytes(std::span(payload)), Deadline(kStartTime));

  std::vector<int> fds{memory.get()};
  for (const int fd : {command.in, command.out, command.err, command.guard}) {
    if (fd >= 0) fds.push_back(fd);
  }
  fds.insert(fds.end(), command.keep.begin(), command.keep.end());
  check(fds.size() <= kMaxFds, "a rank is given few descriptors");
  char byte = 0;
  iovec data{&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(kMaxFds * sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = CMSG_SPACE(fds.size() * sizeof(int));
  cmsghdr* const head = CMSG_FIRSTHDR(&message);
  head->cmsg_level = SOL_SOCKET;
  head->cmsg_type = SCM_RIGHTS;
  head->cmsg_len = CMSG_LEN(fds.size() * sizeof(int));
  std::memcpy(CMSG_DATA(head), fds.data(), fds.size() * sizeof(int));
  if (sendmsg(socket, &message, MSG_NOSIGNAL) != 1) throw SystemError("the fork server", errno);
}

// ---- in the server and its copies ----

[[noreturn]] void leave(int code) { _exit(code); }

// Nothing at the end of the launcher.
std::optional<Received> receive(int socket) {
  char byte = 0;
  iovec data{&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(kMaxFds * sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  ssize_t count = 0;
  while ((count = recvmsg(socket, &message, MSG_CMSG_CLOEXEC)) < 0 && errno == EINTR) {
  }
  const cmsghdr* const head = count == 1 ? CMSG_FIRSTHDR(&message) : nullptr;
  if (head == nullptr) return std::nullopt;
  Received received;
  received.fds.resize((head->cmsg_len - CMSG_LEN(0)) / sizeof(int));
  std::memcpy(received.fds.data(), CMSG_DATA(head), received.fds.size() * sizeof(int));

  const off_t size = lseek(received.fds[0], 0, SEEK_END);
  std::string payload(static_cast<size_t>(size), '\0');
  if (pread(received.fds[0], payload.data(), payload.size(), 0) != size) return std::nullopt;
  const char* at = payload.data();
  const auto take = [&](void* to, size_t bytes) {
    std::memcpy(to, at, bytes);
    at += bytes;
  };
  take(&received.request, sizeof received.request);
  received.keeps.resize(received.request.keeps);
  received.cores.resize(received.request.cores);
  take(received.keeps.data(), received.keeps.size() * sizeof(int));
  take(received.cores.data(), received.cores.size() * sizeof(int));
  for (uint32_t i = 0; i < received.request.environment; ++i) {
    received.environment.emplace_back(at);
    at += received.environment.back().size() + 1;
  }
  return received;
}

// Out of the way of the numbers that they are to have.
void move_up(std::vector<int>& fds, const std::vector<int>& numbers) {
  int above = STDERR_FILENO;
  for (const int number : numbers) above = std::max(above, number);
  for (int& fd : fds) {
    const int moved = fcntl(fd, F_DUPFD_CLOEXEC, above + 1);
    if (moved < 0) leave(127);
    close(fd);
    fd = moved;
  }
}

void become_rank(Received received, int socket) {
  const Request& request = received.request;
  // When the process between us and the launcher has ended, the launcher is the parent.
  while (getppid() != request.launcher) {
    const timespec moment{0, 100'000};
    nanosleep(&moment, nullptr);
    if (kill(request.launcher, 0) != 0) leave(127);
  }
  const int answer = fcntl(socket, F_DUPFD_CLOEXEC, 0);
  close(socket);
  received.fds.push_back(answer);
  move_up(received.fds, received.keeps);
  auto next = received.fds.begin() + 1;
  Command command{.argv = {},
                  .environment = {},
                  .in = request.has[0] ? *next++ : -1,
                  .out = request.has[1] ? *next++ : -1,
                  .err = request.has[2] ? *next++ : -1,
                  .keep = {},
                  .guard = request.has[3] ? *next++ : -1,
                  .cores = std::move(received.cores),
                  .hang_rank = request.hang_rank};
  for (const int number : received.keeps) {
    if (dup3(*next++, number, 0) < 0) leave(127);
  }
  clearenv();
  for (const std::string& entry : received.environment) putenv(strdup(entry.c_str()));
  set_up_child(command, request.launcher);
  // Its command line and the environment in /proc are those of the server.
  if (const char* const rank = std::getenv("RANK"))
    prctl(PR_SET_NAME, format("lockstep-r{}", rank).c_str());
  const pid_t self = getpid();
  [[maybe_unused]] const ssize_t sent = send(received.fds.back(), &self, sizeof self, MSG_NOSIGNAL);
  for (const int fd : received.fds) close(fd);
  if (command.hang_rank >= 0) wait_for_debugger(command.hang_rank);
}

}  // namespace

ForkServer::ForkServer(const std::vector<std::string>& argv, std::vector<std::string> environment) {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0)
    throw SystemError("socketpair", errno);
  socket_ = Fd(ends[0]);
  const Fd other(ends[1]);
  prctl(PR_SET_CHILD_SUBREAPER, 1);
  environment.push_back(format("{}={}", kVariable, ends[1]));
  process_.emplace(Command{.argv = argv,
                           .environment = std::move(environment),
                           .out = STDOUT_FILENO,
                           .err = STDERR_FILENO,
                           .keep = {ends[1]},
                           .cores = {}});
}

Process ForkServer::start(const Command& command) const {
  send_request(socket_.get(), command);
  pid_t pid = -1;
  if (!read_full(socket_, std::as_writable_bytes(std::span(&pid, 1)), Deadline(kStartTime)))
    throw SystemError("the fork server has ended", ECHILD);
  return Process(pid);
}

void serve_forks() {
  const char* const text = std::getenv(kVariable);
  if (text == nullptr) return;
  const int socket = std::atoi(text);
  fcntl(socket, F_SETFD, FD_CLOEXEC);
  while (auto received = receive(socket)) {
    // A process in between, so that the copy is an orphan, whom the launcher inherits.
    const pid_t between = fork();
    if (between == 0) {
      const pid_t rank = fork();
      if (rank != 0) leave(rank < 0 ? 127 : 0);
      return become_rank(std::move(*received), socket);
    }
    for (const int fd : received->fds) close(fd);
    int status = 0;
    if (between > 0) waitpid(between, &status, 0);
    if (between < 0 || !WIFEXITED(status) || WEXITSTATUS(status) != 0) leave(127);
  }
  leave(0);
}

}  // namespace lockstep::launch
