// SPDX-License-Identifier: Apache-2.0
// `lockstep bench codecs`: what each codec keeps of weights and moments, in how many bytes, and how
// fast.
#pragma once

#include <string>
#include <vector>

namespace lockstep::cli {

int bench_codecs(const std::vector<std::string>& arguments);

}  // namespace lockstep::cli
