// SPDX-License-Identifier: Apache-2.0
// Ending the operations of a group from outside. Private: not installed.
#pragma once

#include <string>

#include "lockstep/comm/group.h"

namespace lockstep::comm {

// Breaks the group: running and later operations of all its ranks throw CommError with `why`. One
// rank calls it, from any thread, when the others would wait for it in vain. Where the backend
// cannot interrupt operations, ranks that wait learn of it through the job's store. A group of one
// is left alone.
void abort(const Group& group, const std::string& why);

// The same only where the backend can interrupt operations. Returns false, and does nothing, where
// it cannot: there, operations end at their deadline or when a peer is lost.
bool interrupt(const Group& group, const std::string& why);

}  // namespace lockstep::comm
