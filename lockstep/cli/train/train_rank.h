// SPDX-License-Identifier: Apache-2.0
// `lockstep train`: what one rank does, in lockstep-torch.
#pragma once

#include <string>
#include <vector>

namespace lockstep::cli {

int train_rank(const std::vector<std::string>& arguments);

}  // namespace lockstep::cli
