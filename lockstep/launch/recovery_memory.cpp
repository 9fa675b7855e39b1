// SPDX-License-Identifier: Apache-2.0
#include "lockstep/launch/recovery_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace lockstep::launch {

Fd make_recovery_memory(int ranks) {
  Fd memory(memfd_create("lockstep-recovery", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!memory.valid() || ftruncate(memory.get(), ranks * kRecoveryStride) != 0) return {};
  // A rank that made it shorter would end the others with SIGBUS.
  if (fcntl(memory.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) return {};
  return memory;
}

bool holds_copies(int recovery_memory) {
  struct stat found {};
  return recovery_memory >= 0 && fstat(recovery_memory, &found) == 0 && found.st_blocks > 0;
}

}  // namespace lockstep::launch
