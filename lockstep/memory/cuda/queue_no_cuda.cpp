// SPDX-License-Identifier: Apache-2.0
#include "lockstep/core/error.h"
#include "lockstep/memory/queue_cuda.h"

namespace lockstep::memory::detail::cuda {

std::shared_ptr<Queue> make_queue(c10::Device, const QueueOptions&) {
  throw ConfigError("[queue] this is a build without CUDA");
}

Event record_current(c10::Device) { throw ConfigError("[queue] this is a build without CUDA"); }

void wait_current(const Event&, c10::Device) {
  throw ConfigError("[queue] this is a build without CUDA");
}

}  // namespace lockstep::memory::detail::cuda
