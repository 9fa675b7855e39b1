// What one generation of ranks shares at the rendezvous: who is there, who was lost, and their
// keys.
#pragma once

#include <cstdint>
#include <set>
#include <string>

#include "lockstep/launch/store.h"
#include "lockstep/launch/wire.h"

namespace lockstep::launch {

class KeySpace {
 public:
  explicit KeySpace(int64_t generation) : generation_(generation) {}

  // Empty when the client is let in, otherwise why it is not.
  std::string join(const wire::Hello& hello);
  void leave(int rank) { present_.erase(rank); }
  // It may not come back in this generation.
  void lose(int rank);

  // Answers set, add, find and remove. A get is answered like a find: who waits is not known here.
  wire::Reply answer(const wire::Request& request);

 private:
  const int64_t generation_;
  int world_size_ = 0;  // 0 until the first rank says it
  std::set<int> present_, lost_;
  LocalStore store_;
};

}  // namespace lockstep::launch
