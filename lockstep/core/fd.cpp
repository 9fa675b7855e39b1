// SPDX-License-Identifier: Apache-2.0
#include "lockstep/core/fd.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep {
namespace {

// Returns when `fd` is ready for `events`; throws at the deadline.
void wait_ready(int fd, short events, const Deadline& deadline) {
  pollfd item{fd, events, 0};
  while (true) {
    const int ready =
        poll(&item, 1, static_cast<int>(std::min<long long>(deadline.left().count(), 60'000)));
    if (ready > 0) return;
    if (ready < 0 && errno != EINTR) throw SystemError("poll", errno);
    if (deadline.passed())
      throw TimeoutError(format("no answer on descriptor {} before the deadline", fd));
  }
}

}  // namespace

void Fd::reset() {
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
}

bool read_full(const Fd& fd, std::span<std::byte> bytes, const Deadline& deadline) {
  size_t done = 0;
  while (done < bytes.size()) {
    wait_ready(fd.get(), POLLIN, deadline);
    const ssize_t count = ::read(fd.get(), bytes.data() + done, bytes.size() - done);
    if (count > 0) {
      done += static_cast<size_t>(count);
    } else if (count == 0) {
      if (done == 0) return false;
      throw SystemError(format("end of file after {} of {} bytes", done, bytes.size()), ECONNRESET);
    } else if (errno != EINTR && errno != EAGAIN) {
      throw SystemError("read", errno);
    }
  }
  return true;
}

void write_full(const Fd& fd, std::span<const std::byte> bytes, const Deadline& deadline) {
  size_t done = 0;
  while (done < bytes.size()) {
    // MSG_NOSIGNAL: a closed peer is an error here, not a SIGPIPE. Pipes and files have no such
    // flag.
    ssize_t count = ::send(fd.get(), bytes.data() + done, bytes.size() - done, MSG_NOSIGNAL);
    if (count < 0 && errno == ENOTSOCK)
      count = ::write(fd.get(), bytes.data() + done, bytes.size() - done);
    if (count >= 0) {
      done += static_cast<size_t>(count);
    } else if (errno == EAGAIN) {
      wait_ready(fd.get(), POLLOUT, deadline);
    } else if (errno != EINTR) {
      throw SystemError("write", errno);
    }
  }
}

}  // namespace lockstep
