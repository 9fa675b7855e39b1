// SPDX-License-Identifier: Apache-2.0
#include "lockstep/comm/backends/shm/shm.h"

#include <set>

#include "lockstep/comm/backends/local_group.h"
#include "lockstep/comm/backends/shm/liveness.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/log.h"

namespace lockstep::comm::shm {
namespace {

// How a rank has died, or nothing.
std::function<std::string(int)> make_probe(const detail::Membership& membership,
                                           const std::shared_ptr<fabric::Board>& board) {
  const auto liveness = std::make_shared<Liveness>(board);
  return [liveness, board, store = membership.world->store,
          members = membership.members](int rank) -> std::string {
    std::string death = liveness->death_of(rank);
    // A process that has not joined is not on the board yet; the rendezvous knows of it.
    if (death.empty() && board->slot(rank).state.load() == fabric::SlotState::empty) {
      death = store->find(launch::lost_key(members[static_cast<size_t>(rank)])).value_or("");
    }
    return death;
  };
}

}  // namespace

bool is_available() { return true; }

void make_heap(detail::World& world) {
  if (world.heap) return;
  world.heap = std::make_shared<fabric::SharedHeap>();
  world.peer_heaps = std::make_shared<fabric::PeerHeaps>();
}

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
  make_heap(world);
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
  auto probe = make_probe(membership, board);
  return detail::make_local_group(std::move(membership), "shm", std::move(board), world.heap,
                                  std::move(probe));
}

std::shared_ptr<detail::GroupImpl> create_for_announcements(detail::Membership membership) {
  launch::Store& store = *membership.world->store;
  const Deadline deadline(membership.world->timeout);
  const std::string key = "announcements/" + membership.name;
  std::shared_ptr<fabric::Board> board;
  try {
    if (membership.rank == 0) {
      board = fabric::Board::create(membership.size(), true, membership.world->incarnation,
                                    /*bare=*/true);
      store.set(key, board->handle().to_text());
    } else if (const std::string handle = store.get(key, deadline); !handle.empty()) {
      board = fabric::Board::open(fabric::SegmentHandle::from_text(handle), membership.size(),
                                  membership.world->incarnation);
    }
  } catch (const SystemError& error) {
    // As where ranks of one host are in containers of their own.
    log::debug(format("[init] group '{}': {}", membership.name, error.what()));
    if (membership.rank == 0) store.set(key, "");
  }
  const auto word = [&](int rank) { return format("{}/{}", key, rank); };
  store.set(word(membership.rank), board ? "open" : "closed");
  bool all_open = true;
  for (int rank = 0; rank < membership.size(); ++rank)
    all_open = store.get(word(rank), deadline) == "open" && all_open;
  if (!all_open) return nullptr;
  auto probe = make_probe(membership, board);
  return detail::make_local_group(std::move(membership), "shm", std::move(board), nullptr,
                                  std::move(probe), /*traced=*/false);
}

}  // namespace lockstep::comm::shm
