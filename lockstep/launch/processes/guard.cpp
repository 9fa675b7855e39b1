// SPDX-License-Identifier: Apache-2.0
#include "lockstep/launch/processes/guard.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <csignal>
#include <set>
#include <string>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::launch {

Guard::Guard() {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) throw SystemError("pipe", errno);
  const Fd reader(ends[0]);
  pipe_ = Fd(ends[1]);
  process_.emplace(Command{.argv = {"/proc/self/exe", kCommand},
                           .environment = {},
                           .in = ends[0],
                           .keep = {},
                           .cores = {},
                           .survives = true});
}

Guard::~Guard() {
  pipe_ = Fd();
  pollfd item{process_->pidfd(), POLLIN, 0};
  poll(&item, 1, 1'000);
}

void Guard::forget(pid_t group) const {
  const std::string line = format("-{}\n", group);
  [[maybe_unused]] const ssize_t written = ::write(pipe_.get(), line.data(), line.size());
}

// It was started with signals ignored: it lives exactly as long as the other end of the pipe.
void guard_main() {
  std::set<pid_t> groups;
  std::string text;
  char buffer[4096];
  while (true) {
    const ssize_t count = read(STDIN_FILENO, buffer, sizeof buffer);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) break;
    text.append(buffer, static_cast<size_t>(count));
    for (size_t end = text.find('\n'); end != std::string::npos; end = text.find('\n')) {
      pid_t group = 0;
      std::from_chars(text.data() + 1, text.data() + end, group);
      if (text[0] == '+' && group > 1) groups.insert(group);
      if (text[0] == '-') groups.erase(group);
      text.erase(0, end + 1);
    }
  }
  for (const pid_t group : groups) kill(-group, SIGKILL);
  _exit(0);  // at once: the launcher waits, and there is nothing to clean up
}

}  // namespace lockstep::launch
