// SPDX-License-Identifier: Apache-2.0
#include "lockstep/parallel/tiers/activation_peak.h"

#include <algorithm>

#include "lockstep/memory/meter.h"

namespace lockstep::parallel::detail {

ActivationPeak::ActivationPeak(c10::Device device) : device_(device) {
  if (!device_.is_cpu()) return;
  memory::Meter::install();
  threads_.emplace();
}

void ActivationPeak::resume() {
  if (threads_) return threads_->enter();
  if (begun_) return;
  begun_ = true;
  reset();  // what was there while the model was made is not a step's
}

int64_t ActivationPeak::bytes(int64_t managed) const {
  if (threads_) return threads_->peak();
  return std::max<int64_t>(memory::cuda_peak(device_) - managed, 0);
}

void ActivationPeak::reset() {
  if (threads_) return threads_->reset_peak();
  memory::reset_cuda_peak(device_);
}

}  // namespace lockstep::parallel::detail
