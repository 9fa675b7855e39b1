// SPDX-License-Identifier: Apache-2.0
#include "lockstep/cli/checkpoint/verbs.h"

#include <algorithm>
#include <filesystem>
#include <system_error>

#include "lockstep/config/run_folder.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/formats/checkpoint_folder.h"

namespace lockstep::cli {
namespace {

namespace fs = std::filesystem;

bool is_digit(char c) { return c >= '0' && c <= '9'; }

// The number at the front, without zeros before it, which is taken off.
std::string_view take_number(std::string_view& text) {
  const size_t end = std::min(text.find_first_not_of("0123456789"), text.size());
  std::string_view number = text.substr(0, end);
  text.remove_prefix(end);
  number.remove_prefix(std::min(number.find_first_not_of('0'), number.size()));
  return number;
}

}  // namespace

std::string last_checkpoint(const std::string& name) {
  const std::string path = config::checkpoint_path(name);
  std::error_code error;
  if (fs::exists(path + "/manifest.json", error)) return path;
  const auto all = formats::list_complete(config::checkpoint_folder(path));
  if (all.empty()) throw ConfigError(format("there is no complete checkpoint in {}", path));
  return all.back().path;
}

int64_t bytes_on_disk(const std::string& path) {
  int64_t total = 0;
  std::error_code error;
  for (fs::directory_iterator entry(path, error), last; !error && entry != last;
       entry.increment(error)) {
    std::error_code gone;
    const auto size = entry->file_size(gone);
    if (!gone) total += static_cast<int64_t>(size);
  }
  if (error) throw SystemError("cannot list " + path, error.value());
  return total;
}

bool natural_less(std::string_view a, std::string_view b) {
  const std::string_view whole_a = a, whole_b = b;
  while (!a.empty() && !b.empty()) {
    if (is_digit(a.front()) && is_digit(b.front())) {
      const std::string_view x = take_number(a), y = take_number(b);
      if (x.size() != y.size()) return x.size() < y.size();
      if (x != y) return x < y;
      continue;
    }
    if (a.front() != b.front()) return a.front() < b.front();
    a.remove_prefix(1);
    b.remove_prefix(1);
  }
  if (a.empty() != b.empty()) return a.empty();
  return whole_a < whole_b;  // "01" and "1"
}

}  // namespace lockstep::cli
