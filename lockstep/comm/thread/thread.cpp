#include "lockstep/comm/thread/thread.h"

#include "lockstep/comm/local_group.h"
#include "lockstep/core/format.h"

namespace lockstep::comm::thread {

bool is_available() { return true; }

std::shared_ptr<detail::GroupImpl> create(detail::Membership membership) {
  // The first member makes the board and lends the others its address through the store; they copy the pointer, so the
  // board lives until the last of them leaves. The first one waits for that before its own pointer may move.
  launch::Store& store = *membership.world->store;
  const Deadline deadline(membership.world->timeout);
  const std::string key = "thread/" + membership.name;
  std::shared_ptr<fabric::Board> board;
  if (membership.rank == 0) {
    board = fabric::Board::create(membership.size(), false);
    store.set(key, std::to_string(reinterpret_cast<uintptr_t>(&board)));
    store.get(key + "/taken", deadline);
  } else {
    board = *reinterpret_cast<const std::shared_ptr<fabric::Board>*>(std::stoull(store.get(key, deadline)));
    if (store.add(key + "/copies", 1) == membership.size() - 1) store.set(key + "/taken", "1");
  }
  return detail::make_local_group(std::move(membership), "thread", std::move(board), nullptr, nullptr);
}

}  // namespace lockstep::comm::thread
