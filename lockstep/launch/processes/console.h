// SPDX-License-Identifier: Apache-2.0
// The launcher's own stdout and stderr: whole lines, in order, never blocking the event loop.
#pragma once

#include <string>
#include <string_view>

#include "lockstep/launch/processes/poller.h"

namespace lockstep::launch {

// Bytes that could not be written yet are queued. A stream without a reader swallows what
// it is given.
class Console {
 public:
  enum class Stream { out, err };

  Console(int out, int err, Poller& poller);
  ~Console();
  Console(const Console&) = delete;
  Console& operator=(const Console&) = delete;

  // Whole lines.
  void write(Stream stream, std::string_view lines);
  // "lockstep: text" on stderr.
  void message(std::string_view text);

  bool full(Stream stream) const;  // feed it no more until it has drained
  bool empty() const;
  // Gives up what is queued: the reader is stuck.
  void discard();

 private:
  struct Sink {
    int fd = -1;
    std::string queue;
    size_t done = 0;
    bool at_line_start = true, watched = false, plain_file = false, dead = false;
    size_t left() const { return queue.size() - done; }
  };
  void pump();
  void pump(Sink& sink, const Sink& other);
  void watch(Sink& sink, bool on);

  Poller& poller_;
  Sink out_, err_;
  bool same_file_ = false;
};

}  // namespace lockstep::launch
