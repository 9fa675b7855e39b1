// SPDX-License-Identifier: Apache-2.0
// One output stream of one rank: lines get the rank's name and go to the console, bytes go to a
// file as they are.
#pragma once

#include <string>
#include <string_view>

#include "lockstep/core/fd.h"
#include "lockstep/launch/processes/console.h"

namespace lockstep::launch {

class WorkerLog {
 public:
  // `pipe` must not block. `file` may be invalid: then nothing is kept.
  WorkerLog(Fd pipe, int rank, Console::Stream stream, Fd file);

  Console::Stream stream() const { return stream_; }
  // Moves what is there, up to a limit, so that no rank starves the others. False when the stream
  // has ended and its last line, complete or not, is written.
  bool pump(Console& console);
  // Writes an incomplete last line; for a stream that something keeps open after the rank ended.
  void finish(Console& console);

 private:
  void keep(std::string_view bytes, Console& console);

  Fd pipe_, file_;
  std::string prefix_;
  Console::Stream stream_;
  std::string partial_;
};

// Opens DIR/attempt_K/rankR/{stdout,stderr}.log. Throws ConfigError naming the path.
Fd open_log(const std::string& dir, int attempt, int rank, Console::Stream stream);
// The first K from which on no log of rank R is there.
int free_attempt(const std::string& dir, int rank);
// DIR/attempt_K/rankR
std::string log_folder(const std::string& dir, int attempt, int rank);

}  // namespace lockstep::launch
