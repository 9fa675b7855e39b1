// SPDX-License-Identifier: Apache-2.0
#include "lockstep/train/device/device.h"

namespace lockstep::train {

int64_t peak_cuda_bytes(c10::Device) { return 0; }
void make_current(c10::Device) {}
std::string cuda_name(c10::Device) { return {}; }

}  // namespace lockstep::train
