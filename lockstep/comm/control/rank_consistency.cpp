// SPDX-License-Identifier: Apache-2.0
#include "lockstep/comm/control/rank_consistency.h"

#include <algorithm>
#include <map>
#include <sstream>

#include "lockstep/comm/control/rank_texts.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/rank_env.h"

namespace lockstep::comm {

void require_same(const std::string& lines, const Group& group) {
  if (group.size() == 1) return;
  std::vector<detail::Stated> ranks;
  for (const std::string& text : gather_texts(host_name() + "\n" + lines, group)) {
    auto all = detail::lines_of(text);
    ranks.push_back({all.front(), {all.begin() + 1, all.end()}});
  }
  const std::string differs = detail::difference(ranks);
  if (differs.empty()) return;
  throw ConfigError(
      format("[init] the ranks differ: {}; it must be the same on all of them", differs));
}

namespace detail {

std::vector<std::string> lines_of(const std::string& text) {
  std::istringstream stream(text);
  std::vector<std::string> lines;
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

std::string difference(const std::vector<Stated>& ranks) {
  struct Holders {
    std::vector<size_t> ranks;
    std::vector<std::string> hosts;
  };
  size_t longest = 0;
  for (const Stated& rank : ranks) longest = std::max(longest, rank.lines.size());
  for (size_t index = 0; index < longest; ++index) {
    std::map<std::string, Holders> holders;
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      const auto& [host, lines] = ranks[rank];
      auto& [numbers, hosts] = holders[index < lines.size() ? lines[index] : "nothing"];
      numbers.push_back(rank);
      if (std::find(hosts.begin(), hosts.end(), host) == hosts.end()) hosts.push_back(host);
    }
    if (holders.size() == 1) continue;
    std::vector<std::string> parts;
    for (const auto& [line, who] : holders)
      parts.push_back(format("{} on rank{} {} ({})", line, who.ranks.size() > 1 ? "s" : "",
                             join(who.ranks), join(who.hosts)));
    return join(parts, "; ");
  }
  return {};
}

}  // namespace detail
}  // namespace lockstep::comm
