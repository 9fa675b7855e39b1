// SPDX-License-Identifier: Apache-2.0
// Queues that are CUDA streams; queue_cuda.cpp, or queue_no_cuda.cpp in builds without CUDA.
// Private: not installed.
#pragma once

#include <c10/core/Device.h>

#include <memory>

#include "lockstep/memory/queue.h"

namespace lockstep::memory::detail::cuda {

std::shared_ptr<Queue> make_queue(c10::Device device, const QueueOptions& options);
// On the current stream of the device.
Event record_current(c10::Device device);
// The current stream waits for it; `event.cuda_event()` is not null.
void wait_current(const Event& event, c10::Device device);

}  // namespace lockstep::memory::detail::cuda
