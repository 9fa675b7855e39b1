// SPDX-License-Identifier: Apache-2.0
#include "lockstep/plan/report.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/size_text.h"

namespace lockstep::plan {
namespace {

constexpr std::array kColumns{&Memory::parameters, &Memory::gradients, &Memory::optimizer,
                              &Memory::activations, &Memory::buffers};

struct Row {
  Memory memory;  // the largest of each
  std::vector<size_t> ranks;
};

// Shards that are cut at rows differ by a little.
bool are_alike(const Memory& a, const Memory& b) {
  return std::ranges::all_of(kColumns, [&](int64_t Memory::*column) {
    return std::abs(a.*column - b.*column) <= std::max(a.*column, b.*column) / 100;
  });
}

std::vector<Row> rows_of(std::span<const Memory> all) {
  std::vector<Row> rows;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    const auto alike = std::ranges::find_if(
        rows, [&](const Row& row) { return are_alike(row.memory, all[rank]); });
    if (alike == rows.end()) {
      rows.push_back({all[rank], {rank}});
      continue;
    }
    alike->ranks.push_back(rank);
    for (int64_t Memory::*column : kColumns)
      alike->memory.*column = std::max(alike->memory.*column, all[rank].*column);
  }
  return rows;
}

}  // namespace

std::string rank_ranges(const std::vector<size_t>& ranks) {
  std::vector<std::string> ranges;
  for (size_t begin = 0; begin < ranks.size();) {
    size_t end = begin + 1;
    while (end < ranks.size() && ranks[end] == ranks[end - 1] + 1) ++end;
    ranges.push_back(end - begin == 1 ? format("{}", ranks[begin])
                                      : format("{}-{}", ranks[begin], ranks[end - 1]));
    begin = end;
  }
  constexpr size_t kMost = 4;
  if (ranges.size() <= kMost) return join(ranges);
  ranges.resize(kMost);
  return join(ranges) + format(", ... ({} ranks)", ranks.size());
}

std::string to_table(std::span<const Memory> ranks) {
  std::vector<std::array<std::string, 7>> lines{
      {"ranks", "parameters", "gradients", "optimizer", "activations", "buffers", "total"}};
  for (const auto& [memory, members] : rows_of(ranks)) {
    lines.push_back({rank_ranges(members), size_text(memory.parameters),
                     size_text(memory.gradients), size_text(memory.optimizer),
                     size_text(memory.activations), size_text(memory.buffers),
                     size_text(memory.total())});
  }
  std::array<size_t, 7> widths{};
  for (const auto& line : lines) {
    for (size_t i = 0; i < line.size(); ++i) widths[i] = std::max(widths[i], line[i].size());
  }
  std::string text;
  for (const auto& line : lines) {
    text += format("{:<{}}", line[0], widths[0]);
    for (size_t i = 1; i < line.size(); ++i) text += format("  {:>{}}", line[i], widths[i]);
    text += '\n';
  }
  return text;
}

std::string offload_line(std::span<const Memory> ranks) {
  const auto away = [](const Memory& memory) { return memory.on_host + memory.on_disk; };
  const auto most = std::ranges::max_element(ranks, {}, away);
  const bool alike = away(*std::ranges::min_element(ranks, {}, away)) == away(*most);
  return format("offload before the first step: {} on the host, {} on the disk{}",
                size_text(most->on_host), size_text(most->on_disk),
                alike ? "" : format(" (rank {}, the most)", most - ranks.begin()));
}

size_t largest_total(std::span<const Memory> ranks) {
  return static_cast<size_t>(std::ranges::max_element(ranks, {}, &Memory::total) - ranks.begin());
}

size_t largest_state(std::span<const Memory> ranks) {
  return static_cast<size_t>(std::ranges::max_element(ranks, {}, &Memory::state) - ranks.begin());
}

}  // namespace lockstep::plan
