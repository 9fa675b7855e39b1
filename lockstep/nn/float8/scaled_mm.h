// SPDX-License-Identifier: Apache-2.0
// Private: not installed.
#pragma once

#include <torch/version.h>

// Since then aten::_scaled_mm has the arguments that it has now.
#define LOCKSTEP_HAS_SCALED_MM \
  (TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 5))
