// SPDX-License-Identifier: Apache-2.0
// Runs a command and keeps what it prints, for tests of the launcher.
#pragma once

#include <sys/types.h>

#include <functional>
#include <string>
#include <vector>

#include "lockstep/core/clock.h"
#include "lockstep/core/fd.h"

namespace lockstep::test {

// Polls until the condition holds; false at the deadline. For conditions outside this process.
bool eventually(const std::function<bool()>& condition, milliseconds limit = milliseconds{20'000});

struct Result {
  int code = -1;  // as a shell reports it
  std::string out, err;
  double seconds = 0;
  // The last line of stderr.
  std::string last_line() const;
};

class Subprocess {
 public:
  // `variables` are "NAME=value" on top of this process's environment, "NAME" removes one. Every
  // process it starts carries a mark in its environment, by which alive() finds them.
  explicit Subprocess(const std::vector<std::string>& argv,
                      const std::vector<std::string>& variables = {}, const std::string& in = {});
  ~Subprocess();  // kills what is left of it
  Subprocess(const Subprocess&) = delete;
  Subprocess& operator=(const Subprocess&) = delete;

  pid_t pid() const { return pid_; }
  void kill(int signal) const;
  std::string out() const;
  std::string err() const;
  // Fails the test and kills the process at the limit.
  Result wait(milliseconds limit = milliseconds{120'000});
  // Processes with the mark, other than the command itself.
  std::vector<pid_t> others() const;

 private:
  pid_t pid_ = -1;
  bool reaped_ = false;
  std::string mark_;
  Fd in_, out_, err_;
  Clock::time_point start_;
};

// `lockstep` with these arguments, to its end.
Result lockstep_command(const std::vector<std::string>& arguments,
                        const std::vector<std::string>& variables = {}, const std::string& in = {});

// {"lockstep", "run", "-n", ranks, options..., "sh", "-c", script}
std::vector<std::string> run_script(int ranks, const std::string& script,
                                    const std::vector<std::string>& options = {});

// A new folder that is removed at the end.
class TempDir {
 public:
  TempDir();
  ~TempDir();
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// The path of the program that runs.
std::string this_program();

std::string read_file(const std::string& path);
void write_file(const std::string& path, const std::string& text, int mode = 0600);

}  // namespace lockstep::test
