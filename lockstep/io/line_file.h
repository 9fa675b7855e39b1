// SPDX-License-Identifier: Apache-2.0
// A file that grows by whole lines while a program runs. Losing it must not end the program.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <string_view>

#include "lockstep/core/fd.h"

namespace lockstep::io {

// Each line is one call of write(): a process that is killed loses nothing that it has written.
// Threads may write at the same time.
class LineFile {
 public:
  LineFile() = default;  // writes nothing
  // Appends to what is there. SystemError where it cannot be opened.
  explicit LineFile(std::string path);

  bool is_open() const { return state_ != nullptr; }
  // Without the line end. What does not fit on the disk is lost: a warning says so once, and the
  // lines after the disk has room again begin on a line of their own.
  void write(std::string_view line);

 private:
  struct State {
    std::string path;
    Fd fd;
    std::atomic<bool> torn = false, failed = false;
  };
  std::unique_ptr<State> state_;
};

}  // namespace lockstep::io
