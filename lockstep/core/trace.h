// SPDX-License-Identifier: Apache-2.0
// Chrome-trace spans, on when LOCKSTEP_TRACE names a folder: one file per process, open it in
// Perfetto. The files of one run begin with the same word, "run" and a number, and so are told from
// those of other runs in the folder.
//
// The trace's process is the rank. Spans of one row must nest, so each thread has a row of its own,
// and so has each queue of operations. Times are of the monotonic clock, which the processes of one
// host share.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "lockstep/core/clock.h"

namespace lockstep::trace {

// False unless LOCKSTEP_TRACE is set, or expect_folder() was called; then nothing below costs more
// than a load.
bool enabled();

// Names this process's file: all ranks of a run pass the same number, from comm::init. Only the
// first call counts. A process that has not called it when it first writes is a run of its own.
void begin_run(uint64_t run, int rank);

// For a folder that ranks learn only after they have come together. expect_folder(), called before
// anything is traced, keeps events in memory until write_to() names the folder. LOCKSTEP_TRACE,
// where it is set, is used instead.
void expect_folder();
void write_to(const std::string& folder);

class Row {
 public:
  Row(int rank, std::string_view name);
  // `args` is the inside of a JSON object, e.g. "\"bytes\":4096"; build it only if enabled().
  void add(std::string_view category, std::string_view name, Clock::time_point start,
           Clock::time_point end, std::string_view args = {}) const;

 private:
  int rank_, id_;
};

// Says whose thread this is: its spans go to a row of that rank. Without it they go to RANK's, or
// to rank 0's.
void name_thread(int rank, std::string_view name);

// From construction to destruction, on this thread's row.
class Span {
 public:
  Span(std::string_view category, std::string_view name, std::string args = {});
  ~Span();
  Span(const Span&) = delete;
  Span& operator=(const Span&) = delete;

 private:
  bool active_;
  Clock::time_point start_;
  std::string category_, name_, args_;
};

// Writes what is buffered. Happens at exit too.
void flush();

}  // namespace lockstep::trace
