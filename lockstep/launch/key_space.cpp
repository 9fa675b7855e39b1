#include "lockstep/launch/key_space.h"

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/launch/rendezvous.h"

namespace lockstep::launch {

std::string KeySpace::join(const wire::Hello& hello) {
  const char* const word = generation_ == kControlGeneration ? "node" : "rank";
  if (hello.generation != generation_) {
    return format("rank {} belongs to generation {}, the job is in generation {}", hello.rank,
                  hello.generation, generation_);
  }
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
  if (lost_.contains(hello.rank)) {
    return format("{} {} was lost in this generation and may not come back", word, hello.rank);
  }
  if (world_size_ == 0) first_ = hello.rank;
  world_size_ = hello.world_size;
  present_.insert(hello.rank);
  return {};
}

void KeySpace::lose(int rank) {
  present_.erase(rank);
  lost_.insert(rank);
}

std::optional<wire::Request> KeySpace::end_meeting(const std::string& how) {
  if (store_.find(kMeetingKey)) return std::nullopt;
  return wire::Request{wire::Op::set, kMeetingKey, how};
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
      case wire::Op::hello:
      case wire::Op::goodbye:
        break;
    }
    return {wire::Status::refused, "said hello twice"};
  } catch (const Error& failure) {
    return {wire::Status::refused, failure.what()};
  }
}

}  // namespace lockstep::launch
