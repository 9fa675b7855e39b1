// SPDX-License-Identifier: Apache-2.0
// What the ranks of this host write, on its way to the console and to files.
#pragma once

#include <map>
#include <memory>
#include <set>

#include "lockstep/core/fd.h"
#include "lockstep/launch/processes/console.h"
#include "lockstep/launch/processes/poller.h"
#include "lockstep/launch/processes/worker_log.h"

namespace lockstep::launch {

class RankOutput {
 public:
  RankOutput(Poller& poller, Console& console) : poller_(poller), console_(console) {}
  ~RankOutput();
  RankOutput(const RankOutput&) = delete;
  RankOutput& operator=(const RankOutput&) = delete;

  // `file`: gets a copy, unless it is not valid.
  void add(Fd pipe, int rank, Console::Stream stream, Fd file);
  // Reads again for a console that has room again. To be called from time to time.
  void resume();
  bool is_paused() const { return !paused_.empty(); }
  bool is_over() const { return logs_.empty(); }
  // Lines that have no end go out too.
  void finish();

 private:
  void watch(int fd);
  void pump(int fd);
  void pause(Console::Stream stream);

  Poller& poller_;
  Console& console_;
  std::map<int, std::unique_ptr<WorkerLog>> logs_;  // by descriptor
  std::set<Console::Stream> paused_;
};

}  // namespace lockstep::launch
