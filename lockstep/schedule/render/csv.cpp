// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstddef>
#include <limits>
#include <string>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/input_file.h"
#include "lockstep/schedule/render/render.h"
#include "lockstep/schedule/validate.h"

namespace lockstep::schedule {
namespace {

constexpr uint64_t kMaxFile = uint64_t{256} << 20;

std::string_view trimmed(std::string_view text) {
  const auto begin = text.find_first_not_of(" \t\r");
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(" \t\r") - begin + 1);
}

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(separator, begin), text.size());
    parts.push_back(trimmed(text.substr(begin, end - begin)));
    begin = end + 1;
  }
  return parts;
}

}  // namespace

std::string to_csv(const Schedule& schedule) {
  std::string text = format("placement,{}\n", schedule.order == StageOrder::v ? "v" : "loop");
  for (const auto& actions : schedule.actions) {
    std::vector<std::string> names;
    for (const Action& action : actions) names.push_back(name_of(action, schedule.chunks));
    text += join(names, ",") + "\n";
  }
  return text;
}

Schedule from_csv(std::string_view text, const std::string& path) {
  const auto refuse = [&](size_t line, const std::string& rule) {
    return ConfigError(format("{}:{}: {}", path, line, rule));
  };
  auto lines = split(text, '\n');
  while (!lines.empty() && lines.back().empty()) lines.pop_back();
  if (lines.empty()) throw ConfigError(path + ": is empty, must be a schedule");

  Schedule schedule{{Kind::file}};
  const auto head = split(lines[0], ',');
  if (head.size() == 2 && head[0] == "placement" && head[1] == "v") {
    schedule.order = StageOrder::v;
  } else if (head.size() != 2 || head[0] != "placement" || head[1] != "loop") {
    throw refuse(1, format("is '{}', must be placement,loop or placement,v", lines[0]));
  }
  if (lines.size() == 1) throw refuse(1, "no rank follows");

  // Any chunk is allowed until all are known; then those that name none are of the only one.
  const bool chunked = std::any_of(lines.begin() + 1, lines.end(), [](std::string_view line) {
    return line.find('.') != std::string_view::npos;
  });
  schedule.ranks = static_cast<int>(lines.size()) - 1;
  for (size_t line = 1; line < lines.size(); ++line) {
    auto& actions = schedule.actions.emplace_back();
    for (const std::string_view name : split(lines[line], ',')) {
      try {
        actions.push_back(parse_action(name, chunked ? std::numeric_limits<int>::max() : 1));
      } catch (const ConfigError& error) {
        throw refuse(line + 1, format("rank {}: {}", line - 1, error.what()));
      }
      schedule.microbatches = std::max(schedule.microbatches, actions.back().microbatch + 1);
      schedule.chunks = std::max(schedule.chunks, actions.back().chunk + 1);
    }
  }
  if (const auto fault = detail::find_fault(schedule)) {
    if (fault->rank < 0) throw refuse(1, fault->what);
    throw refuse(static_cast<size_t>(fault->rank) + 2,
                 format("rank {}: {}", fault->rank, fault->what));
  }
  return schedule;
}

Schedule read_csv(const std::string& path) {
  std::string text;
  try {
    text = read_text(path, kMaxFile);
  } catch (const Error& error) {
    throw ConfigError(format("[schedule] {}", error.what()));
  }
  return from_csv(text, path);
}

}  // namespace lockstep::schedule
