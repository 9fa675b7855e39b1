// SPDX-License-Identifier: Apache-2.0
#include "lockstep/launch/rendezvous/key_space.h"

#include <algorithm>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/launch/rendezvous/rendezvous.h"

namespace lockstep::launch {

std::string KeySpace::join(const wire::Hello& hello) {
  const char* const word = generation_ == kControlGeneration ? "node" : "rank";
  if (hello.rank < 0) return {};
  if (hello.rank >= hello.world_size) {
    return format("{} {} is outside its world of {}", word, hello.rank, hello.world_size);
  }
  if (world_size_ != 0 && world_size_ != hello.world_size) {
    return format("{} {} counts {} {}s in all, {} {} counts {}", word, hello.rank, hello.world_size,
                  word, word, first_, world_size_);
  }
  if (present_.contains(hello.rank)) {
    return format("{} {} is already connected: two processes have the same number", word,
                  hello.rank);
  }
  // A node may come back to a job that runs, with another launcher.
  if (generation_ == kControlGeneration && is_decided() && lost_.erase(hello.rank) > 0)
    store_.remove(lost_key(hello.rank));
  if (lost_.contains(hello.rank)) {
    return format("{} {} was lost and cannot join again", word, hello.rank);
  }
  if (world_size_ == 0) first_ = hello.rank;
  world_size_ = hello.world_size;
  present_.insert(hello.rank);
  came_.insert(hello.rank);
  return {};
}

void KeySpace::lose(int rank) {
  present_.erase(rank);
  lost_.insert(rank);
}

bool KeySpace::is_over() const {
  return static_cast<int>(came_.size()) == world_size_ && present_.empty();
}

std::optional<wire::Request> KeySpace::end_joining(const std::string& how) {
  if (store_.find(kJoinedKey)) return std::nullopt;
  return wire::Request{wire::Op::set, kJoinedKey, how};
}

wire::Reply KeySpace::answer(const wire::Request& request) {
  try {
    switch (request.op) {
      case wire::Op::set:
        store_.set(request.key, request.value);
        return {};
      case wire::Op::add: {
        const auto amount = wire::unpack_number(request.value);
        if (!amount) return {wire::Status::refused, "add: not a number"};
        return {wire::Status::ok, wire::pack(store_.add(request.key, *amount))};
      }
      case wire::Op::remove:
        return {store_.remove(request.key) ? wire::Status::ok : wire::Status::absent, {}};
      case wire::Op::get:
      case wire::Op::find: {
        auto value = store_.find(request.key);
        if (!value) return {wire::Status::absent, {}};
        return {wire::Status::ok, std::move(*value)};
      }
      case wire::Op::goodbye:
        break;
    }
    return {wire::Status::refused, "not a question"};
  } catch (const Error& failure) {
    return {wire::Status::refused, failure.what()};
  }
}

std::shared_ptr<KeySpace> Generation::place_of(const wire::Hello& hello) {
  const auto place = [this](int64_t incarnation) -> std::shared_ptr<KeySpace>& {
    auto& space = spaces_[incarnation];
    if (!space) space = std::make_shared<KeySpace>(number_, incarnation, world_size_);
    return space;
  };
  if (hello.rank < 0) {
    const auto found = spaces_.find(hello.incarnation);
    if (found != spaces_.end()) return found->second;
    return hello.incarnation == 0 && spaces_.empty() ? place(0) : nullptr;
  }
  int64_t& joined = joined_[hello.rank];
  if (joined > 0) {
    // Before all have met, one that comes twice is two processes with one number.
    const auto latest = spaces_.find(joined - 1);
    if (latest != spaces_.end() && latest->second->is_present(hello.rank) &&
        !latest->second->is_decided()) {
      return latest->second;
    }
    if (single_) return nullptr;
  }
  return place(joined++);
}

std::vector<std::shared_ptr<KeySpace>> Generation::ahead_of(int rank) const {
  const auto joined = joined_.find(rank);
  const int64_t latest = joined == joined_.end() ? 0 : joined->second - 1;
  std::vector<std::shared_ptr<KeySpace>> spaces;
  for (auto at = spaces_.lower_bound(latest); at != spaces_.end(); ++at)
    spaces.push_back(at->second);
  return spaces;
}

void Generation::forget_what_is_over() {
  if (spaces_.empty()) return;
  // The latest stays: a client that is not a rank may still ask for its keys.
  const auto latest = std::prev(spaces_.end());
  for (auto at = spaces_.begin(); at != latest;)
    at = at->second->is_over() ? spaces_.erase(at) : std::next(at);
}

bool Generation::is_over_or_broken() const {
  return std::ranges::all_of(spaces_, [](const auto& space) {
    return space.second->is_over() || space.second->has_lost();
  });
}

}  // namespace lockstep::launch
