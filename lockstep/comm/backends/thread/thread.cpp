// SPDX-License-Identifier: Apache-2.0
#include "lockstep/comm/backends/thread/thread.h"

#include "lockstep/comm/backends/local_group.h"
#include "lockstep/comm/shared_objects.h"

namespace lockstep::comm::thread {

bool is_available() { return true; }

std::shared_ptr<detail::GroupImpl> create(detail::Membership membership) {
  // The first member makes the board, the others take a share in it: it lives until the last of
  // them leaves. All come together in make_local_group, and only then is it taken back: a member
  // that comes when the first has given up finds a board that says so.
  const std::shared_ptr<detail::World> world = membership.world;
  const bool is_first = membership.rank == 0;
  const std::string key = "thread/" + membership.name;
  std::shared_ptr<fabric::Board> board;
  uint64_t number = 0;
  if (is_first) {
    board = fabric::Board::create(membership.size(), false);
    number = world->objects->put(board);
    world->store->set(key, std::to_string(number));
  } else {
    number = std::stoull(world->store->get(key, Deadline(world->timeout)));
    board = std::static_pointer_cast<fabric::Board>(world->objects->get(number));
  }
  auto group = detail::make_local_group(std::move(membership), "thread", board, nullptr, nullptr);
  if (is_first) world->objects->remove(number);
  return group;
}

}  // namespace lockstep::comm::thread
