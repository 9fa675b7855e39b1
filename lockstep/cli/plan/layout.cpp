// SPDX-License-Identifier: Apache-2.0
#include "lockstep/cli/plan/verbs.h"
#include "lockstep/core/error.h"

namespace lockstep::cli {

int plan_layout(std::vector<std::string>) { throw ConfigError("plan layout"); }

}  // namespace lockstep::cli
