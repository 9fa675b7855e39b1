// SPDX-License-Identifier: Apache-2.0
// Who writes what. Ranks that hold the same slice share the work.
#include <algorithm>
#include <map>
#include <tuple>

#include "lockstep/checkpoint/cut_slices.h"
#include "lockstep/checkpoint/write_slices.h"
#include "lockstep/comm/control/rank_texts.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/formats/checkpoint_folder.h"

namespace lockstep::checkpoint::detail {
namespace {

// What tells two slices apart; the same text on every rank that holds the slice.
std::string identity(const NamedSlice& slice) {
  return slice.placement.name + " " + slice.placement.slice.describe();
}

// Nothing of a tensor that others hold; a tensor without elements is whole, and kept.
bool is_nothing(const NamedSlice& slice) {
  return slice.placement.is_empty() && !slice.placement.is_whole();
}

constexpr char kOfFirst = '*';  // before an entry of a list: ranks may hold other values

// Which rank writes each slice: the one with the least to write among those that hold it, largest
// slices first; or the first of them, where its values count. Every rank computes the same from the
// same lists.
std::map<std::string, size_t> choose_writers(const std::vector<std::string>& lists) {
  struct Candidate {
    bool of_first = false;
    int64_t bytes = 0;
    std::vector<size_t> holders = {};
  };
  std::map<std::string, Candidate> candidates;
  for (size_t rank = 0; rank < lists.size(); ++rank) {
    std::string_view list = lists[rank];
    while (!list.empty()) {  // "BYTES IDENTITY\0" or "*BYTES IDENTITY\0"
      std::string entry(list.substr(0, list.find('\0')));
      list.remove_prefix(entry.size() + 1);
      const bool of_first = entry.front() == kOfFirst;
      if (of_first) entry.erase(0, 1);
      const size_t space = entry.find(' ');
      Candidate& candidate = candidates[entry.substr(space + 1)];
      candidate.of_first = candidate.of_first || of_first;
      candidate.bytes = std::stoll(entry.substr(0, space));
      candidate.holders.push_back(rank);
    }
  }
  std::vector<std::pair<int64_t, std::string>> order;
  for (const auto& [name, candidate] : candidates) order.emplace_back(-candidate.bytes, name);
  std::sort(order.begin(), order.end());
  std::vector<int64_t> load(lists.size());
  std::map<std::string, size_t> writers;
  for (const auto& [negative_bytes, name] : order) {
    const auto& [of_first, bytes, holders] = candidates[name];
    const size_t writer =
        of_first ? holders.front()
                 : *std::min_element(holders.begin(), holders.end(), [&](size_t a, size_t b) {
                     return std::tie(load[a], a) < std::tie(load[b], b);
                   });
    load[writer] -= negative_bytes;
    writers[name] = writer;
  }
  return writers;
}

// What of them is not slices.
void check_rest(const SaveRequest& request) {
  formats::step_folder_name(request.step);
  formats::Manifest{.step = request.step, .state = request.state, .config = request.config}
      .to_json();
  if (request.keep < 0)
    throw ConfigError(format("[checkpoint] keep is {}, must be at least 0", request.keep));
}

}  // namespace

SaveRequest share_of(const SaveRequest& request, const comm::Group& group) {
  const auto lists = comm::run_on_all_ranks("save", group, [&] {
    check_rest(request);
    std::string list;
    for (const NamedSlice& slice : request.slices) {
      check_slice(slice);
      if (is_nothing(slice)) continue;
      if (slice.saving) slice.saving();
      if (slice.of_first_rank) list += kOfFirst;
      list += std::to_string(slice.tensor.nbytes()) + " " + identity(slice) + '\0';
    }
    return list;
  });
  auto writers = choose_writers(lists);
  SaveRequest mine = request;
  mine.slices.clear();
  for (const NamedSlice& slice : request.slices) {
    const auto found = writers.find(identity(slice));
    if (found == writers.end() || static_cast<int>(found->second) != group.rank()) continue;
    mine.slices.push_back(slice);
    writers.erase(found);  // a rank that lists a slice twice writes it once
  }
  return mine;
}

}  // namespace lockstep::checkpoint::detail
