// SPDX-License-Identifier: Apache-2.0
// Scripts that complete the command's words in a shell, made from what the commands say of
// themselves.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace lockstep::cli {

// A command that users type, and a way to ask it for its help.
struct HelpSource {
  std::string name, summary;
  std::function<std::string(const std::vector<std::string>&)> help;  // of these words after it
};

// `shell` is bash, zsh or fish; others are a ConfigError.
std::string completion_script(const std::string& shell, const std::vector<HelpSource>& commands);

}  // namespace lockstep::cli
