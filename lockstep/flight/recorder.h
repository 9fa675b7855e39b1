// SPDX-License-Identifier: Apache-2.0
// Writes down what this process, as a rank, calls and reaches. Always on: an entry costs some 200
// ns and no lock.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "lockstep/core/clock.h"
#include "lockstep/core/dtype.h"
#include "lockstep/flight/page.h"

namespace lockstep::flight {

// The descriptor of the page that the launcher has made for this rank.
inline constexpr const char* kVariable = "LOCKSTEP_FLIGHT_FD";
// A folder that ranks whose launcher does not read their pages write them to when they fail.
inline constexpr const char* kFolderVariable = "LOCKSTEP_FLIGHT_DIR";

struct Call {
  uint16_t group = 0;
  std::string_view operation;
  std::string_view tag;
  DType dtype = DType::uint8;
  int64_t count = 0;
  int peer = -1;           // a world rank
  int patience_ms = 2000;  // a shorter wait for it is not reported
  bool message = false;
  bool on_device = false;  // nothing waits for it in a call: it counts as awaited from the start
};

// Takes the launcher's page, or memory of its own, for the first job that this process joins.
// Threads that are ranks have no recorder.
void start(int rank, int world);
bool started();
// The launcher sees the page, and says who is late.
bool is_watched();

// The number of a group in entries.
uint16_t add_group(const std::string& name, int size);

// Returns the entry's ticket, 0 where nothing is recorded.
uint64_t begin(const Call& call);
void wait(uint64_t ticket);
// The call that began it has also waited for its end.
void ended_in_call(uint64_t ticket);
void end(uint64_t ticket, Clock::time_point at);
// What broke the group, for a reader of the page; the first is kept.
void fail(std::string_view what);

void set_step(int64_t step, int64_t nanoseconds, int64_t blocked);
void set_saved(int64_t step);
void set_phase(Phase phase);
// Something moves that has no entry, such as a file that is written.
void show_life();

// The page of this process, null before start().
const Page* page();

// Writes the page to a file of kFolderVariable's folder, or of one that was set; does nothing where
// there is none, or where the launcher does it.
void set_folder(const std::string& folder);
void dump_own();

}  // namespace lockstep::flight
