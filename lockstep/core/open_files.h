// SPDX-License-Identifier: Apache-2.0
// How many files this process may have open at once. Private: not installed.
#pragma once

namespace lockstep {

// Raises the soft limit (ulimit -n) to the hard one, or to 1,048,576 where the hard one is larger:
// some programs close every descriptor up to the limit when they start. Child processes inherit it.
void raise_open_file_limit();

}  // namespace lockstep
