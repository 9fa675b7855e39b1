// SPDX-License-Identifier: Apache-2.0
// `lockstep sample` and `lockstep eval`: what one rank does, in lockstep-torch.
#pragma once

#include <string>
#include <vector>

namespace lockstep::cli {

int sample_rank(const std::vector<std::string>& arguments);
int eval_rank(const std::vector<std::string>& arguments);

}  // namespace lockstep::cli
