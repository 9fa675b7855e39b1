// SPDX-License-Identifier: Apache-2.0
#include "lockstep/launch/processes/poller.h"

#include <array>
#include <cerrno>

#include "lockstep/core/error.h"

namespace lockstep::launch {
namespace {

// The id tells a descriptor from a closed one that had the same number.
epoll_event event_for(int fd, uint32_t id, uint32_t events) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = (static_cast<uint64_t>(id) << 32) | static_cast<uint32_t>(fd);
  return event;
}

}  // namespace

Poller::Poller() : epoll_(epoll_create1(EPOLL_CLOEXEC)) {
  if (!epoll_.valid()) throw SystemError("epoll_create1", errno);
}

bool Poller::watch(int fd, uint32_t events, Handler handler) {
  const uint32_t id = next_id_++;
  epoll_event event = event_for(fd, id, events);
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
    if (errno == EPERM) return false;
    throw SystemError("epoll_ctl", errno);
  }
  watches_[fd] = {id, std::make_shared<Handler>(std::move(handler))};
  return true;
}

void Poller::change(int fd, uint32_t events) {
  const auto found = watches_.find(fd);
  if (found == watches_.end()) return;
  epoll_event event = event_for(fd, found->second.id, events);
  epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event);
}

void Poller::forget(int fd) {
  if (watches_.erase(fd) > 0) epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
}

void Poller::wait(milliseconds timeout) {
  std::array<epoll_event, 128> events;
  const int count = epoll_wait(epoll_.get(), events.data(), events.size(),
                               static_cast<int>(std::min<long long>(timeout.count(), 60'000)));
  if (count < 0 && errno != EINTR) throw SystemError("epoll_wait", errno);
  for (int i = 0; i < count; ++i) {
    const auto found = watches_.find(static_cast<int>(events[i].data.u64 & 0xffffffff));
    if (found == watches_.end() || found->second.id != events[i].data.u64 >> 32) continue;
    const auto handler = found->second.handler;
    (*handler)();
  }
}

}  // namespace lockstep::launch
