// SPDX-License-Identifier: Apache-2.0
// The process that cleans up when the launcher is killed: it knows every rank's process group and
// ends them as soon as the launcher's end of their pipe closes, so that a shell script's children
// do not stay behind.
#pragma once

#include <sys/types.h>

#include <optional>

#include "lockstep/core/fd.h"
#include "lockstep/launch/processes/process.h"

namespace lockstep::launch {

class Guard {
 public:
  // The hidden command by which the running executable is started again as a guard: its main() must
  // pass it to guard_main().
  static constexpr const char* kCommand = "__guard";

  Guard();
  // Ends the guard and waits for it.
  ~Guard();

  // Children announce themselves here (Command::guard).
  int announcements() const { return pipe_.get(); }
  // Must be called before the process is reaped and its number can be another's.
  void forget(pid_t group) const;

 private:
  Fd pipe_;
  std::optional<Process> process_;
};

// Reads "+pid" and "-pid" lines from descriptor 0; at its end kills the groups that are left.
[[noreturn]] void guard_main();

}  // namespace lockstep::launch
