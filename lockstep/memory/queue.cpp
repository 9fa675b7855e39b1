// SPDX-License-Identifier: Apache-2.0
#include "lockstep/memory/queue.h"

#include "lockstep/memory/event_wait.h"
#include "lockstep/memory/paced_queue.h"
#include "lockstep/memory/queue_cuda.h"

namespace lockstep::memory {

std::shared_ptr<Queue> make_queue(c10::Device device, QueueOptions options) {
  if (!device.is_cuda()) return make_host_queue(std::move(options));
  auto queue = detail::cuda::make_queue(device, options);
  if (!options.paced) return queue;
  const auto behind = std::exchange(options.behind, nullptr);
  return detail::make_paced_queue(std::move(queue), behind, std::move(options));
}

Event computed(c10::Device device) {
  return device.is_cuda() ? detail::cuda::record_current(device) : Event();
}

void compute_after(const Event& event, c10::Device device) {
  if (device.is_cuda() && event.cuda_event() != nullptr) {
    detail::cuda::wait_current(event, device);
  } else {
    detail::wait_in_thread(event);
  }
}

}  // namespace lockstep::memory
