// SPDX-License-Identifier: Apache-2.0
#include "lockstep/train/integrity/checksum.h"

namespace lockstep::train::detail {

bool add_sum_on_gpu(const at::Tensor& /*tensor*/, const Words& /*words*/,
                    const at::Tensor& /*sum*/) {
  return false;
}

}  // namespace lockstep::train::detail
