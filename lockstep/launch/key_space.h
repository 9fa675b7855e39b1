// What one generation of ranks shares at the rendezvous: who is there, who was lost, and their
// keys.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>

#include "lockstep/launch/store.h"
#include "lockstep/launch/wire.h"

namespace lockstep::launch {

class KeySpace {
 public:
  // With a size of 0 the first rank says how many there are.
  KeySpace(int64_t generation, int world_size) : generation_(generation), world_size_(world_size) {}

  int64_t generation() const { return generation_; }
  // Empty when the client is let in, otherwise why it is not.
  std::string join(const wire::Hello& hello);
  // The others need not wait for all to come: this has gone wrong. Nothing once they have met.
  std::optional<wire::Request> end_meeting(const std::string& how);
  void leave(int rank) { present_.erase(rank); }
  // It may not come back in this generation.
  void lose(int rank);

  // Answers set, add, find and remove. A get is answered like a find: who waits is not known here.
  wire::Reply answer(const wire::Request& request);

 private:
  const int64_t generation_;
  int world_size_;
  int first_ = 0;  // who said it
  std::set<int> present_, lost_;
  LocalStore store_;
};

}  // namespace lockstep::launch
