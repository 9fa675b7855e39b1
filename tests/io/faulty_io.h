// SPDX-License-Identifier: Apache-2.0
// Stands in for lockstep/io/file_calls.cpp: the same calls, of which one goes wrong.
#pragma once

namespace lockstep::io::calls {

enum class Fault {
  none,
  fail,       // the call returns an error; nothing happened
  kill,       // the process ends before the call
  data_lost,  // the power fails before the call: bytes that were not synced are gone
  all_lost,   // and so are names that were not synced: files made, files and folders renamed
  trickle     // from this call on, writes take few bytes at a time, or are interrupted
};

// The call-th call from now, beginning at 1, goes wrong. Forgets what was not synced before.
void arm(Fault fault, int call);
int count();  // since arm()

}  // namespace lockstep::io::calls
