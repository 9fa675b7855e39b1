// SPDX-License-Identifier: Apache-2.0
// The memory of a flight recorder: what one rank has called, waits for, and has reached.
//
// Where `lockstep run` or `lockstep train -n` has started the rank, this memory is the launcher's
// too: it is read while the rank hangs, and after it was killed. Nothing in it is ever locked.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace lockstep::flight {

constexpr size_t kEntries = 1024;
constexpr size_t kGroups = 128;
constexpr size_t kSteps = 16;
constexpr size_t kStackBytes = 48 << 10;
constexpr const char* kPageName = "lockstep-flight";  // of the file that holds it
constexpr uint32_t kMagic = 0x4c6b5332;

// Times are nanoseconds of the monotonic clock, which all processes of a host share; 0: not yet.
struct Entry {
  std::atomic<uint64_t> ticket;  // its place in the order of all entries, from 1; 0: being written
  int64_t began;
  std::atomic<int64_t> waited;  // since when a thread does nothing but wait for it
  std::atomic<int64_t> ended;
  int64_t count;  // elements
  // Collectives of a group are numbered in the order of calls, which is the same on all its ranks;
  // so are the messages from one rank to another.
  uint32_t number;
  int32_t peer;         // world rank of a message's other end, or of a root; -1: none
  int32_t patience_ms;  // a shorter wait is not reported
  uint16_t group;
  uint8_t dtype;
  bool message;
  char operation[16];
  char tag[44];
};

struct GroupSlot {
  std::atomic<uint32_t> used;
  int32_t size;
  std::atomic<uint32_t> calls;  // collectives
  char name[84];
};

struct StepTime {
  std::atomic<int64_t> step;
  int64_t nanoseconds, blocked;
};

enum class Phase : uint32_t { starting, loading, training, evaluating, saving, ended };

struct Page {
  std::atomic<uint32_t> magic;  // set when a rank has taken the page
  int32_t rank, world, pid;
  uint32_t generation;
  int64_t clock_offset;         // what turns its times into those of the wall clock
  std::atomic<uint64_t> signs;  // of life: grows with whatever moves
  std::atomic<int64_t> step;    // that is done; -1: the program does not say
  std::atomic<int64_t> step_at;
  std::atomic<int64_t> saved_step;  // the last that was saved; -1: none
  std::atomic<Phase> phase;
  std::atomic<uint64_t> steps;  // how many were written to step_times
  StepTime step_times[kSteps];
  // The launcher adds one to `asked` and wakes; the rank sets `answered` to it when `stacks` is
  // complete.
  std::atomic<uint32_t> asked, answered;
  std::atomic<bool> answers;  // a thread waits for that
  char failure[1024];
  char stacks[kStackBytes];
  GroupSlot groups[kGroups];
  std::atomic<uint64_t> next;
  Entry entries[kEntries];
};

}  // namespace lockstep::flight
