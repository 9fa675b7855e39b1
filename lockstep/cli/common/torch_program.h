// SPDX-License-Identifier: Apache-2.0
// The other programs that `lockstep` starts: itself, and lockstep-torch next to it.
#pragma once

#include <string>
#include <vector>

namespace lockstep::cli {

std::string own_path();
// Throws ConfigError where this build has none.
std::string torch_path();
// Whether it is that program, whose main() calls launch::serve_forks().
bool is_torch_program(const std::string& path);

enum class StandardOutput { shown, discarded };

// Runs a program to its end with this one's standard streams; its exit status.
int run_program(const std::vector<std::string>& words,
                StandardOutput output = StandardOutput::shown);
// Becomes the program.
[[noreturn]] void become_program(const std::vector<std::string>& words);

}  // namespace lockstep::cli
