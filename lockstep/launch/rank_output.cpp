// SPDX-License-Identifier: Apache-2.0
#include "lockstep/launch/rank_output.h"

namespace lockstep::launch {

RankOutput::~RankOutput() {
  for (const auto& [fd, log] : logs_) poller_.forget(fd);
}

void RankOutput::add(Fd pipe, int rank, Console::Stream stream, Fd file) {
  const int fd = pipe.get();
  logs_[fd] = std::make_unique<WorkerLog>(std::move(pipe), rank, stream, std::move(file));
  if (!paused_.contains(stream)) watch(fd);
}

void RankOutput::watch(int fd) {
  poller_.watch(fd, EPOLLIN, [this, fd] { pump(fd); });
}

void RankOutput::pump(int fd) {
  WorkerLog& log = *logs_.at(fd);
  if (console_.full(log.stream())) return pause(log.stream());
  if (log.pump(console_)) return;
  poller_.forget(fd);
  logs_.erase(fd);
}

// A reader that is slower than the ranks slows them down, as a plain pipe would; the other stream
// continues.
void RankOutput::pause(Console::Stream stream) {
  if (!paused_.insert(stream).second) return;
  for (const auto& [fd, log] : logs_) {
    // Not only masked: epoll reports a hang-up whatever the mask is.
    if (log->stream() == stream) poller_.forget(fd);
  }
}

void RankOutput::resume() {
  for (const auto stream : {Console::Stream::out, Console::Stream::err}) {
    if (!paused_.contains(stream) || console_.full(stream)) continue;
    paused_.erase(stream);
    for (const auto& [fd, log] : logs_) {
      if (log->stream() == stream) watch(fd);
    }
  }
}

void RankOutput::finish() {
  for (const auto& [fd, log] : logs_) log->finish(console_);
}

}  // namespace lockstep::launch
