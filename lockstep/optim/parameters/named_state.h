// SPDX-License-Identifier: Apache-2.0
// Loading named tensors. Private: not installed.
#pragma once

#include <span>
#include <string>

#include "lockstep/optim/parameters/parameters.h"

namespace lockstep::optim {

// Copies every entry into the tensor of the same name in `own`. Throws ConfigError, before anything
// is copied, that names all entries that are missing, unknown, given twice or of another shape.
void load_named(const std::string& operation, std::span<const NamedTensor> own,
                std::span<const NamedTensor> entries);

}  // namespace lockstep::optim
