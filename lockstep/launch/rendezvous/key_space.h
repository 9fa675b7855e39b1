// SPDX-License-Identifier: Apache-2.0
// What ranks share at the rendezvous: who is there, who was lost, and their keys. A generation is a
// start of all ranks by the launcher; an incarnation is one start of communication by all ranks of
// a generation, and has a key space of its own.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "lockstep/launch/rendezvous/store.h"
#include "lockstep/launch/rendezvous/wire.h"

namespace lockstep::launch {

class KeySpace {
 public:
  // With a size of 0 the first rank says how many there are.
  KeySpace(int64_t generation, int64_t incarnation, int world_size)
      : generation_(generation), incarnation_(incarnation), world_size_(world_size) {}

  int64_t generation() const { return generation_; }
  int64_t incarnation() const { return incarnation_; }
  // Empty when the client is let in, otherwise why it is not.
  std::string join(const wire::Hello& hello);
  // The others need not wait for all to come: this has gone wrong. Nothing once they have met.
  std::optional<wire::Request> end_joining(const std::string& how);
  bool is_decided() { return store_.find(kJoinedKey).has_value(); }
  bool is_present(int rank) const { return present_.contains(rank); }
  void leave(int rank) { present_.erase(rank); }
  // It may not come back to this space.
  void lose(int rank);
  // All have come, and have left or were lost.
  bool is_over() const;
  bool has_lost() const { return !lost_.empty(); }

  // Answers set, add, find and remove. A get is answered like a find: who waits is not known here.
  wire::Reply answer(const wire::Request& request);

 private:
  const int64_t generation_, incarnation_;
  int world_size_;
  int first_ = 0;  // who said it
  std::set<int> present_, lost_, came_;
  LocalStore store_;
};

// The incarnations of one generation. The n-th hello of a rank joins the n-th incarnation, so that
// ranks which start communication again and again always meet those of the same start, however far
// ahead of others they are.
class Generation {
 public:
  // A generation of a single incarnation lets each rank come once.
  Generation(int64_t number, int world_size, bool single)
      : number_(number), world_size_(world_size), single_(single) {}

  int64_t number() const { return number_; }
  // Where this client belongs. Null where there is no such place: for a rank, because it has been
  // in the only incarnation.
  std::shared_ptr<KeySpace> place_of(const wire::Hello& hello);
  // The incarnations that this rank has not left behind: its latest and all that are to come.
  std::vector<std::shared_ptr<KeySpace>> ahead_of(int rank) const;
  // The rank will not come any more: ranks of later incarnations shall not wait for it.
  void mark_gone(int rank, const std::string& how) { gone_[rank] = how; }
  const std::map<int, std::string>& gone() const { return gone_; }
  void forget_what_is_over();
  // No rank is there any more, or one was lost in the latest incarnation.
  bool is_over_or_broken() const;

 private:
  const int64_t number_;
  const int world_size_;
  const bool single_;
  std::map<int64_t, std::shared_ptr<KeySpace>> spaces_;  // by incarnation
  std::map<int, int64_t> joined_;                        // how often each rank has come
  std::map<int, std::string> gone_;
};

}  // namespace lockstep::launch
