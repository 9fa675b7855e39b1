// SPDX-License-Identifier: Apache-2.0
#include "lockstep/plan/gather_arena.h"

#include <algorithm>
#include <map>

namespace lockstep::plan {
namespace {

// Lines are put where the first gap is large enough.
class Arena {
 public:
  explicit Arena(int64_t largest) : largest_(largest) {}

  void hold(const LineUse& line) {
    if (std::ranges::any_of(taken_, [&](auto& each) { return each.second.unit == line.unit; }))
      return;
    // Lines of about the same size take each other's places.
    const int64_t place = line.bytes > largest_ / 2 ? largest_ : line.bytes;
    int64_t begin = 0;
    for (const auto& [taken_begin, taken] : taken_) {
      if (taken_begin - begin >= place) break;
      begin = taken.end;
    }
    taken_[begin] = {line.unit, begin + place};
    occupied_ = std::max(occupied_, begin + line.bytes);
  }
  void release_all_but(size_t one, size_t other) {
    std::erase_if(taken_, [&](const auto& each) {
      return each.second.unit != one && each.second.unit != other;
    });
  }
  int64_t occupied() const { return occupied_; }

 private:
  struct Taken {
    size_t unit;
    int64_t end;
  };

  int64_t largest_;
  std::map<int64_t, Taken> taken_;  // by begin
  int64_t occupied_ = 0;
};

}  // namespace

int64_t gathered_bytes(std::span<const LineUse> uses) {
  int64_t largest = 0;
  for (const LineUse& use : uses) largest = std::max(largest, use.bytes);
  Arena arena(largest);
  for (size_t i = 0; i < uses.size(); ++i) {
    const LineUse& next = i + 1 < uses.size() ? uses[i + 1] : uses[i];
    arena.release_all_but(uses[i].unit, next.unit);
    arena.hold(uses[i]);
    arena.hold(next);
  }
  return arena.occupied();
}

}  // namespace lockstep::plan
