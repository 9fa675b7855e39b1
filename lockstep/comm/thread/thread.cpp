#include "lockstep/comm/thread/thread.h"

#include "lockstep/comm/local_group.h"

namespace lockstep::comm::thread {

bool is_available() { return true; }

std::shared_ptr<detail::GroupImpl> create(detail::Membership membership) {
  // The first member makes the board and tells the others where its pointer is; they copy it, so
  // the board lives until the last of them leaves. All come together in make_local_group, and only
  // then may the first one's pointer go.
  launch::Store& store = *membership.world->store;
  const Deadline deadline(membership.world->timeout);
  const std::string key = "thread/" + membership.name;
  std::shared_ptr<fabric::Board> board;
  if (membership.rank == 0) {
    board = fabric::Board::create(membership.size(), false);
    store.set(key, std::to_string(reinterpret_cast<uintptr_t>(&board)));
  } else {
    board = *reinterpret_cast<const std::shared_ptr<fabric::Board>*>(
        std::stoull(store.get(key, deadline)));
  }
  return detail::make_local_group(std::move(membership), "thread", board, nullptr, nullptr);
}

}  // namespace lockstep::comm::thread
