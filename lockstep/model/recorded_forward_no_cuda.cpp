// SPDX-License-Identifier: Apache-2.0
#include "lockstep/model/recorded_forward.h"

namespace lockstep::model {

std::unique_ptr<RecordedForward> record(c10::Device, const std::function<at::Tensor()>&) {
  return nullptr;
}

}  // namespace lockstep::model
