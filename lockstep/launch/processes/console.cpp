// SPDX-License-Identifier: Apache-2.0
#include "lockstep/launch/processes/console.h"

#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>

#include "lockstep/core/log.h"

namespace lockstep::launch {
namespace {

constexpr size_t kFull = 1u << 20;

}  // namespace

Console::Console(int out, int err, Poller& poller) : poller_(poller) {
  out_.fd = out;
  err_.fd = err;
  struct stat a {
  }, b{};
  const bool out_known = fstat(out, &a) == 0, err_known = fstat(err, &b) == 0;
  out_.dead = !out_known;
  err_.dead = !err_known;
  out_.plain_file = S_ISREG(a.st_mode);
  err_.plain_file = S_ISREG(b.st_mode);
  same_file_ = out_known && err_known && a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

Console::~Console() {
  watch(out_, false);
  watch(err_, false);
}

void Console::write(Stream stream, std::string_view lines) {
  Sink& sink = stream == Stream::out ? out_ : err_;
  if (sink.dead) return;
  sink.queue.append(lines);
  pump();
}

void Console::message(std::string_view text) {
  const std::string line = std::string("lockstep: ").append(text);
  write(Stream::err, line + "\n");
  log::copy_line(line);  // of a training run, for its log.txt
}

bool Console::full(Stream stream) const {
  return (stream == Stream::out ? out_ : err_).left() > kFull;
}

bool Console::empty() const { return out_.left() == 0 && err_.left() == 0; }

void Console::discard() {
  for (Sink* sink : {&out_, &err_}) {
    sink->dead = true;
    sink->queue.clear();
    sink->done = 0;
    watch(*sink, false);
  }
}

void Console::pump() {
  // Twice: a line that the first left half written held back the second.
  pump(out_, err_);
  pump(err_, out_);
  pump(out_, err_);
}

void Console::pump(Sink& sink, const Sink& other) {
  while (sink.left() > 0) {
    // On one terminal or pipe, a long line in pieces is finished before the other stream gets its
    // turn.
    if (same_file_ && !other.at_line_start) return watch(sink, false);
    // A pipe that polls writable takes PIPE_BUF bytes without blocking; we may not make it
    // non-blocking, because it is shared with the process that started us.
    pollfd item{sink.fd, POLLOUT, 0};
    if (!sink.plain_file && poll(&item, 1, 0) <= 0) return watch(sink, true);
    size_t size = sink.plain_file ? sink.left() : std::min<size_t>(sink.left(), PIPE_BUF);
    const size_t last_end = sink.queue.rfind('\n', sink.done + size - 1);
    if (last_end != std::string::npos && last_end >= sink.done) size = last_end + 1 - sink.done;
    const ssize_t count = ::write(sink.fd, sink.queue.data() + sink.done, size);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && errno == EAGAIN) return watch(sink, true);
    if (count < 0) {
      sink.dead = true;  // closed pipe, full disk: the job continues without this stream
      sink.at_line_start = true;
      sink.done = sink.queue.size();
      break;
    }
    sink.done += static_cast<size_t>(count);
    sink.at_line_start = sink.queue[sink.done - 1] == '\n';
    if (sink.done > kFull) {
      sink.queue.erase(0, sink.done);
      sink.done = 0;
    }
  }
  sink.queue.clear();
  sink.done = 0;
  watch(sink, false);
}

void Console::watch(Sink& sink, bool on) {
  if (sink.watched == on) return;
  sink.watched = on;
  if (!on) {
    poller_.forget(sink.fd);
  } else if (!poller_.watch(sink.fd, EPOLLOUT, [this] { pump(); })) {
    sink.watched = false;
    sink.plain_file = true;  // cannot be watched, so it cannot block either
  }
}

}  // namespace lockstep::launch
