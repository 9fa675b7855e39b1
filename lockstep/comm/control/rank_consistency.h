// SPDX-License-Identifier: Apache-2.0
// Texts that ranks compare: what must be the same on all of them, and who has what where it is not.
#pragma once

#include <string>
#include <vector>

#include "lockstep/comm/group.h"

namespace lockstep::comm {

// Lines that must be the same on all ranks, such as what decides the model. Throws ConfigError on
// all of them that says who has what in the first line that differs. Collective.
void require_same(const std::string& lines, const Group& group);

namespace detail {

std::vector<std::string> lines_of(const std::string& text);

struct Stated {
  std::string host;
  std::vector<std::string> lines;
};
// "lr = 1 on ranks 0, 1 (a); lr = 2 on ranks 2, 3 (b)", of the first line that differs between the
// ranks; empty where none does.
std::string difference(const std::vector<Stated>& ranks);

}  // namespace detail
}  // namespace lockstep::comm
