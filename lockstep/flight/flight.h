// SPDX-License-Identifier: Apache-2.0
// What a page said at one moment, as plain values.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/flight/page.h"

namespace lockstep::flight {

struct Operation {
  std::string group = {}, name = {}, dtype = {}, tag = {};
  uint64_t ticket = 0;
  uint32_t number = 0;
  int peer = -1;
  bool message = false;
  int64_t count = 0;
  int64_t began = 0, waited = 0, ended = 0;
  int patience_ms = 0;

  bool running() const { return ended == 0; }
  // "all_reduce #812 of group 'world' (float32[1024], layer3.w)"
  std::string text() const;
};

struct GroupUse {
  std::string name = {};
  int size = 0;
  uint32_t calls = 0;
};

struct Flight {
  int rank = -1, world = 0, pid = 0;
  uint32_t generation = 0;
  std::string host = {};
  int64_t taken_at = 0, clock_offset = 0;
  int64_t step = -1, step_at = 0, saved_step = -1;
  Phase phase = Phase::starting;
  std::string failure = {};  // that broke a group of this rank
  std::string end = {};      // how the process ended, where the reader knows
  int64_t ended_at = 0;
  std::string stacks = {};
  std::vector<int64_t> step_ns = {}, blocked_ns = {};  // of the last steps, the newest last
  std::vector<GroupUse> groups = {};
  std::vector<Operation> operations = {};  // oldest first

  const Operation* last() const { return operations.empty() ? nullptr : &operations.back(); }
  // The one that a thread has waited for longest; null where none waits.
  const Operation* awaited() const;
  // How many collectives of this group were called; -1 where the rank is not in it.
  int64_t calls_of(const std::string& group) const;
  // "in step 57 (training); has finished all_reduce #811 of group 'world' 2.1 s ago"
  std::string doing() const;
};

// The page may be written meanwhile: entries that change while they are read are left out.
Flight read_page(const Page& page);

// The page of a running rank of this host, from another process of the same user; none where it
// has no page, or where it may not be read.
std::optional<Flight> read_process(int pid);

std::string name_of(Phase phase);

}  // namespace lockstep::flight
