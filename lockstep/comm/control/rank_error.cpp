// SPDX-License-Identifier: Apache-2.0
#include "lockstep/comm/control/rank_error.h"

#include <sstream>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::comm::detail {
namespace {

constexpr char kHasValue = '+', kHasError = '!';  // what a contribution begins with

}  // namespace

RankError RankError::of(const std::exception_ptr& error, int rank) {
  try {
    std::rethrow_exception(error);
  } catch (const PeerLost& lost) {
    return {Kind::peer_lost, lost.rank(), lost.what()};
  } catch (const DamagedData& damaged) {
    return {Kind::damaged, damaged.rank(), damaged.what()};
  } catch (const TimeoutError& timeout) {
    return {Kind::timeout, rank, timeout.what()};
  } catch (const MismatchError& mismatch) {
    return {Kind::mismatch, rank, mismatch.what()};
  } catch (const CommError& comm) {
    return {Kind::comm, rank, comm.what()};
  } catch (const CheckpointError& checkpoint) {
    return {Kind::checkpoint, rank, checkpoint.what()};
  } catch (const ConfigError& config) {
    return {Kind::config, rank, config.what()};
  } catch (const std::exception& other) {
    return {Kind::other, rank, other.what()};
  }
}

// "L 3 message"
std::string RankError::to_text() const {
  return format("{} {} {}", static_cast<char>(kind), rank, message);
}

RankError RankError::parse(const std::string& text) {
  std::istringstream words(text);
  char kind = static_cast<char>(Kind::other);
  RankError error;
  words >> kind >> error.rank;
  error.kind = static_cast<Kind>(kind);
  words.ignore();
  std::getline(words, error.message, '\0');
  return error;
}

bool RankError::is_comm() const {
  return kind == Kind::peer_lost || kind == Kind::timeout || kind == Kind::mismatch ||
         kind == Kind::damaged || kind == Kind::comm;
}

void RankError::raise() const {
  switch (kind) {
    case Kind::peer_lost:
      throw PeerLost(rank, message);
    case Kind::timeout:
      throw TimeoutError(message);
    case Kind::mismatch:
      throw MismatchError(message);
    case Kind::damaged:
      throw DamagedData(rank, message);
    case Kind::comm:
      throw CommError(message);
    case Kind::checkpoint:
      throw CheckpointError(message);
    case Kind::config:
      throw ConfigError(message);
    case Kind::other:
      break;
  }
  throw Error(message);
}

Contribution::Contribution(int rank, const std::function<std::string()>& make, size_t most) {
  try {
    text_ = kHasValue + make();
  } catch (const std::exception&) {
    failure_ = std::current_exception();
    text_ = (kHasError + RankError::of(failure_, rank).to_text()).substr(0, most);
  }
}

void Contribution::throw_if_failed() const {
  if (failure_) std::rethrow_exception(failure_);
}

std::optional<RankError> Contribution::error_in(const std::string& text) {
  if (text.empty() || text.front() != kHasError) return std::nullopt;
  return RankError::parse(text.substr(1));
}

std::string Contribution::value_in(const std::string& text) {
  check(!text.empty() && text.front() == kHasValue, "a rank that has not failed sends a value");
  return text.substr(1);
}

}  // namespace lockstep::comm::detail
