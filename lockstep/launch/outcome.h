// SPDX-License-Identifier: Apache-2.0
// How one attempt of a job ended, in a form that the launchers of several nodes can exchange.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace lockstep::launch {

// "My state is saved, start me again."
inline constexpr int kSaved = 75;

struct Outcome {
  // resized: the ranks have stopped so that more of them are started.
  enum class Kind { finished, failed, stopped, resized };
  Kind kind = Kind::finished;
  int code = 0;              // what the launcher exits with
  bool restartable = false;  // trying again may help
  std::string text = {};     // the last line; empty if there is nothing to say
  int64_t step = -1;         // that its ranks had reached; -1: they do not count
  int64_t ran_ms = 0;
};

// False for the codes by which a program says that starting it again would not help: 2 and 78 (its
// input is wrong), 74 (its data has changed), 75 (preempted, its state is saved), 93 (do not
// restart).
bool restart_may_help(int code);

std::string pack(const Outcome& outcome);
std::optional<Outcome> unpack_outcome(std::string_view text);

}  // namespace lockstep::launch
