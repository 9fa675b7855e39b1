// SPDX-License-Identifier: Apache-2.0
// A child process: its own process group, ended with its launcher.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

#include "lockstep/core/fd.h"

namespace lockstep::launch {

// "SIGKILL"
std::string signal_name(int signal);

struct ExitStatus {
  int code = 0;
  int signal = 0;  // 0 unless a signal ended it
  bool good() const { return code == 0 && signal == 0; }
  // As a shell reports it: the code, or 128 + signal.
  int shell_code() const { return signal != 0 ? 128 + signal : code; }
  // "exited with code 3", "was killed by SIGKILL (signal 9)"
  std::string text() const;
};

struct Command {
  std::vector<std::string> argv;
  std::vector<std::string> environment;
  int in = -1, out = -1, err = -1;  // become descriptors 0, 1 and 2; -1 is /dev/null
  std::vector<int> keep;            // stay open under their numbers
  int guard = -1;          // where the child writes "+pid\n" before anything runs in its name
  std::vector<int> cores;  // empty: wherever the parent runs
  int hang_rank = -1;      // this rank waits for a debugger before it starts
  bool survives = false;   // a session of its own, and no death with the parent
};

// What a child does before it runs a program in its own name: its group, descriptors, signals and
// cores. Makes system calls only.
void set_up_child(const Command& command, pid_t parent);
// Says how to attach, and returns when a debugger has.
void wait_for_debugger(int rank);

// Not reaped before destruction, so its process group's number stays its own. Not thread safe;
// children die with the thread that started them.
class Process {
 public:
  // Returns once the program has started; throws SystemError with the system's reason where it
  // could not.
  explicit Process(const Command& command);
  // A child that another process has made for this one.
  explicit Process(pid_t child);
  // Kills what is left of its group and reaps it.
  ~Process();
  Process(Process&& other) noexcept;
  Process& operator=(Process&&) = delete;

  pid_t pid() const { return pid_; }
  int pidfd() const { return pidfd_.get(); }  // readable when it has ended
  void signal_group(int signal) const;
  // Not waited for any more; signals do nothing.
  void abandon() { pid_ = -1; }
  std::optional<ExitStatus> status() const;  // nothing while it runs
  // Whether a signal has stopped it (its number) or it continues (0), where that is news.
  std::optional<int> take_stop() const;

 private:
  pid_t pid_ = -1;
  Fd pidfd_;
};

}  // namespace lockstep::launch
