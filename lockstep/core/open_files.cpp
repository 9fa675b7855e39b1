// SPDX-License-Identifier: Apache-2.0
#include "lockstep/core/open_files.h"

#include <sys/resource.h>

#include <algorithm>

namespace lockstep {

void raise_open_file_limit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  const rlim_t wanted = std::min<rlim_t>(limit.rlim_max, 1 << 20);
  if (limit.rlim_cur >= wanted) return;
  limit.rlim_cur = wanted;
  // A refusal leaves what there was; the call that runs out of descriptors says so.
  [[maybe_unused]] const int refused = setrlimit(RLIMIT_NOFILE, &limit);
}

}  // namespace lockstep
