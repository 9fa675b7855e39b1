// SPDX-License-Identifier: Apache-2.0
// What CMake puts into the program: the page's style sheet and script, and a charting library where
// it is installed.
#pragma once

#include <string_view>

namespace lockstep::report {

std::string_view page_style();
// With the library before it; the page works without the library, with static pictures.
std::string_view page_script();
std::string_view page_script_sha256();  // 64 hexadecimal digits

}  // namespace lockstep::report
