// SPDX-License-Identifier: Apache-2.0
// Finds writes to memory that has been freed. Replaces operator delete of the program.
#pragma once

namespace lockstep::test {

// From now on what is freed stays, and is marked.
void keep_freed_memory();
bool is_freed_memory_untouched();

}  // namespace lockstep::test
