// SPDX-License-Identifier: Apache-2.0
#include "lockstep/train/device/device.h"

namespace lockstep::train {

int64_t peak_cuda_bytes(c10::Device) { return 0; }
void make_current(c10::Device) {}
std::string cuda_name(c10::Device) { return {}; }

QueuedWork::QueuedWork(c10::Device) {}
double QueuedWork::restart() { return 0; }
void QueuedWork::end() {}

}  // namespace lockstep::train
