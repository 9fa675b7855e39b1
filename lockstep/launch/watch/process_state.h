// SPDX-License-Identifier: Apache-2.0
// Why a process does not run: what /proc and its cgroups say.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>

namespace lockstep::launch {

struct ProcessState {
  char state = '?';  // R, S, D, T, t, Z as in /proc/PID/stat
  pid_t tracer = 0;
  bool frozen = false;  // its cgroup is

  bool held_on_purpose() const { return tracer != 0 || frozen; }
  // "is traced by pid 55 (gdb)", "is in a frozen cgroup", "is stopped", "is stuck in the kernel",
  // "is running", "is sleeping"
  std::string text() const;
};

ProcessState state_of(pid_t process);

// How often the kernel has killed for want of memory: in the cgroup of a process, and anywhere.
class MemoryKills {
 public:
  explicit MemoryKills(pid_t process);
  // Where it has since: "the kernel was out of memory: the limit of its cgroup is 300 MiB".
  std::optional<std::string> since() const;

 private:
  std::string folder_;  // of the cgroup's memory controller; empty if it has none
  bool unified_ = true;
  int64_t in_group_ = 0, anywhere_ = 0;
};

}  // namespace lockstep::launch
