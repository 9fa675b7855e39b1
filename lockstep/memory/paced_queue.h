// SPDX-License-Identifier: Apache-2.0
// Copies that wait in a thread and not in the device. A device's copy engine takes what all streams
// have handed to it in turn: behind gigabytes of state that are not needed soon, the few bytes that
// a forward starts with wait for half a second. Private: not installed.
#pragma once

#include <memory>

#include "lockstep/memory/queue.h"

namespace lockstep::memory::detail {

// Hands copies to `queue` when what they wait for has passed, at most two before the first of them
// is done, and none while one of `behind`, another paced queue or null, is in flight.
std::shared_ptr<Queue> make_paced_queue(std::shared_ptr<Queue> queue,
                                        const std::shared_ptr<Queue>& behind, QueueOptions options);

}  // namespace lockstep::memory::detail
