// SPDX-License-Identifier: Apache-2.0
// Memory of the launcher in which the ranks of its node keep copies of their state. It survives the
// death of any of them and ends with the launcher: it has no name in any file system.
#pragma once

#include <sys/types.h>

#include "lockstep/core/fd.h"

namespace lockstep::launch {

// The descriptor under which a rank has it.
inline constexpr const char* kRecoveryVariable = "LOCKSTEP_RECOVERY_FD";

// Each rank of the node has this many bytes of it, in the order of their local ranks. Only what is
// written takes memory.
inline constexpr off_t kRecoveryStride = off_t{1} << 40;

// Comes with SIGTERM (sigqueue) where ranks are to stop at a step boundary because the job
// continues with more of them: copies of that step in this memory are then as good as a checkpoint.
inline constexpr int kStopToResize = 0x4c6b7265;

// Not valid where the system refuses it, as a limit of file sizes does.
Fd make_recovery_memory(int ranks);
// Whether ranks have written to it.
bool holds_copies(int recovery_memory);

}  // namespace lockstep::launch
