#include "lockstep/comm/shm/shm.h"

#include <set>

#include "lockstep/comm/local_group.h"
#include "lockstep/comm/shm/liveness.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::comm::shm {

bool is_available() { return true; }

std::shared_ptr<detail::GroupImpl> create(detail::Membership membership) {
  detail::World& world = *membership.world;
  std::set<int> hosts;
  for (const int member : membership.members)
    hosts.insert(world.hosts[static_cast<size_t>(member)]);
  if (hosts.size() > 1) {
    throw ConfigError(format(
        "backend shm: the {} ranks of group '{}' are on {} hosts, must be on one; use mpi or gloo",
        membership.size(), membership.name, hosts.size()));
  }
  if (!world.heap) {
    world.heap = std::make_shared<fabric::SharedHeap>();
    world.peer_heaps = std::make_shared<fabric::PeerHeaps>();
  }
  const std::string key = "shm/" + membership.name;
  std::shared_ptr<fabric::Board> board;
  if (membership.rank == 0) {
    board = fabric::Board::create(membership.size(), true, world.incarnation);
    world.store->set(key, board->handle().to_text());
  } else {
    board = fabric::Board::open(
        fabric::SegmentHandle::from_text(world.store->get(key, Deadline(world.timeout))),
        membership.size(), world.incarnation);
  }
  const auto liveness = std::make_shared<Liveness>(board);
  const std::shared_ptr<launch::Store> store = world.store;
  const auto probe = [liveness, board, store,
                      members = membership.members](int rank) -> std::string {
    std::string death = liveness->death_of(rank);
    // A process that has not joined is not on the board yet; the meeting point knows of it.
    if (death.empty() && board->slot(rank).state.load() == fabric::SlotState::empty) {
      death = store->find(launch::lost_key(members[static_cast<size_t>(rank)])).value_or("");
    }
    return death;
  };
  return detail::make_local_group(std::move(membership), "shm", std::move(board), world.heap,
                                  probe);
}

}  // namespace lockstep::comm::shm
