// SPDX-License-Identifier: Apache-2.0
// Stacks of all threads of this process, for who asks through its page.
#pragma once

#include "lockstep/flight/page.h"

namespace lockstep::flight {

// Starts the thread that answers. Threads are interrupted by a real-time signal for a moment; a
// thread that blocks signals has no stack in the answer.
void answer_requests(Page& page);

// From now on this signal makes the process write its page and stacks to its folder (dump_own()).
void dump_on_signal(int signal);

// Asks the process of this page. Its stacks are there when has_answered(); that never comes from a
// process that is stopped, or stuck in the kernel.
void ask_for_stacks(Page& page);
bool has_answered(const Page& page);

}  // namespace lockstep::flight
