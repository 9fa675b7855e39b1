// SPDX-License-Identifier: Apache-2.0
#include "lockstep/cli/infer/json_input.h"

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <iostream>
#include <iterator>
#include <system_error>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/input_file.h"

namespace lockstep::cli {

void require_file(const std::string& option, const std::string& path) {
  if (path.empty() || path == "-") return;
  std::error_code error;
  if (!std::filesystem::is_directory(path, error) && access(path.c_str(), R_OK) == 0) return;
  throw ConfigError(format("{}: {} is not a file that can be read", option, path));
}

std::string read_input(const std::string& path) {
  if (path != "-") return read_text(path, io::kMaxJsonBytes);
  return {std::istreambuf_iterator<char>(std::cin), {}};
}

void for_each_json_line(
    const std::string& text, const std::string& file,
    const std::function<void(const io::OrderedJson& json, const std::string& place)>& take) {
  int line = 0;
  for (size_t begin = 0, end = 0; begin < text.size(); begin = end + 1) {
    end = std::min(text.find('\n', begin), text.size());
    ++line;
    const std::string record = text.substr(begin, end - begin);
    if (record.find_first_not_of(" \t\r") == std::string::npos) continue;
    const std::string place = format("{}:{}", file, line);
    take(io::parse_user_json(record, place), place);
  }
}

}  // namespace lockstep::cli
