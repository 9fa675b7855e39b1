// SPDX-License-Identifier: Apache-2.0
// Saves checkpoints concurrently with training.
//
//   checkpoint::Saver saver("checkpoints", group);
//   saver.save({.step = step, .slices = state});   // returns when the state is copied
//   saver.wait();                                  // at the end
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/checkpoint/checkpoint.h"
#include "lockstep/comm/group.h"

namespace lockstep::checkpoint {

// What to do about a save while an earlier one is still being written.
enum class WhenBusy { wait, skip };

struct SaverOptions {
  bool background = true;  // false: save() returns when the checkpoint is complete
};

// How a save ended.
struct SaveResult {
  int64_t step = 0;
  std::string path = {};  // empty where it failed
  std::string error = {};
  double seconds = 0;  // from the call of save() to the end
  double waited = 0;   // of them, until save() returned
};

// Copies what this rank will write to memory of the host, and writes it in a thread of its own,
// over a group of its own. There is one such copy, which is kept for the next save: its size is the
// bound of what this takes, plus a temporary for a slice that is not contiguous. A save that
// fails leaves nothing behind, is logged by one rank, and does not keep later ones from being
// tried. From lock() or the first save on, no other process can save in the folder until this is
// destroyed. Not for several threads at a time.
class Saver {
 public:
  // Collective.
  Saver(std::string dir, const comm::Group& group = {}, SaverOptions options = {});
  // Waits for what is being written.
  ~Saver();
  Saver(const Saver&) = delete;
  Saver& operator=(const Saver&) = delete;

  // Collective. Takes the folder for this job now, not in the first save. ConfigError where another
  // process saves there.
  void lock();

  // Collective. Makes the memory for saves of such slices now, not in the first of them.
  void reserve(const std::vector<NamedSlice>& slices);

  // Collective. Returns when the slices may be changed again: true. With WhenBusy::skip it returns
  // false, at once, where the last save is not complete yet. Throws what is wrong with `request`
  // and what ends the group, and CheckpointError where another job has taken the folder over; a
  // disk's failure is for wait() and take_finished() to tell.
  bool save(const SaveRequest& request, WhenBusy when_busy = WhenBusy::wait);

  // Returns when the last save is complete, and throws where it failed. Once for each failure.
  void wait();

  // The saves that have ended since the last call, in order. Not collective.
  std::vector<SaveResult> take_finished();

 private:
  class Writer;
  std::unique_ptr<Writer> writer_;
};

}  // namespace lockstep::checkpoint
