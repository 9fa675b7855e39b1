// SPDX-License-Identifier: Apache-2.0
#include "lockstep/train/recovery/copied_slices.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <utility>

#include "lockstep/core/format.h"
#include "lockstep/core/system_memory.h"
#include "lockstep/io/json.h"
#include "lockstep/train/recovery/copy_region.h"

namespace lockstep::train {

using layout::Box;

std::string CopiedSlice::key() const {
  return format("{} {} {} {}", rank, name, box.describe(), name_of(dtype));
}

std::string to_text(std::span<const CopiedSlice> slices) {
  nlohmann::json list = nlohmann::json::array();
  for (const CopiedSlice& slice : slices) {
    nlohmann::json ranges = nlohmann::json::array();
    for (const auto& [begin, end] : slice.box.ranges) ranges.insert(ranges.end(), {begin, end});
    list.push_back(
        {slice.name, slice.shape, ranges, static_cast<int>(slice.dtype), slice.rank, slice.offset});
  }
  return list.dump();
}

std::vector<CopiedSlice> slices_from(const std::string& text) {
  std::vector<CopiedSlice> slices;
  for (const auto& entry : io::parse_json(text, "list of copies")) {
    CopiedSlice slice{.name = entry[0], .shape = entry[1].get<layout::Shape>()};
    for (size_t i = 0; i < entry[2].size(); i += 2)
      slice.box.ranges.push_back({entry[2][i], entry[2][i + 1]});
    slice.dtype = static_cast<DType>(entry[3].get<int>());
    slice.rank = entry[4];
    slice.offset = entry[5];
    slices.push_back(std::move(slice));
  }
  return slices;
}

namespace {

void add_to(std::vector<CopiedSlice>& copy, const CopiedSlice& slice) {
  const uint64_t end = copy_bytes(copy);
  copy.push_back(slice);
  copy.back().offset = end;
}

// Of the ranks of one node.
std::vector<std::vector<CopiedSlice>> share_on_node(
    std::span<const std::vector<CopiedSlice>> held) {
  struct Candidate {
    const CopiedSlice* slice = nullptr;
    std::vector<size_t> holders = {};
  };
  std::map<std::string, Candidate> candidates;
  for (size_t rank = 0; rank < held.size(); ++rank) {
    for (const CopiedSlice& slice : held[rank]) {
      Candidate& candidate = candidates[slice.key()];
      candidate.slice = &slice;
      candidate.holders.push_back(rank);
    }
  }
  std::vector<std::pair<uint64_t, std::string>> order;
  for (const auto& [key, candidate] : candidates) order.emplace_back(candidate.slice->bytes(), key);
  std::sort(order.rbegin(), order.rend());
  std::vector<std::vector<CopiedSlice>> shares(held.size());
  for (const auto& [bytes, key] : order) {
    const auto& [slice, holders] = candidates[key];
    const size_t least = *std::min_element(holders.begin(), holders.end(), [&](size_t a, size_t b) {
      return copy_bytes(shares[a]) < copy_bytes(shares[b]);
    });
    add_to(shares[least], *slice);
  }
  return shares;
}

}  // namespace

std::vector<CopyShare> share_copies(std::span<const std::vector<CopiedSlice>> held,
                                    std::span<const int> nodes) {
  std::vector<CopyShare> shares;
  std::vector<size_t> firsts;
  for (size_t first = 0; first < held.size();) {
    const auto end = std::find_if(nodes.begin() + static_cast<int64_t>(first), nodes.end(),
                                  [&](int node) { return node != nodes[first]; });
    const auto size = static_cast<size_t>(end - nodes.begin()) - first;
    for (auto& own : share_on_node(held.subspan(first, size)))
      shares.push_back({.own = std::move(own)});
    firsts.push_back(first);
    first += size;
  }
  if (firsts.size() == 1) return shares;
  std::map<std::string, int> copies;  // nodes that have one
  for (const CopyShare& share : shares) {
    for (const CopiedSlice& slice : share.own) ++copies[slice.key()];
  }
  for (size_t i = 0; i < firsts.size(); ++i) {
    const auto end_of = [&](size_t node) {
      return node + 1 < firsts.size() ? firsts[node + 1] : shares.size();
    };
    const size_t next = (i + 1) % firsts.size(), size = end_of(next) - firsts[next];
    for (size_t rank = firsts[i]; rank < end_of(i); ++rank) {
      for (const CopiedSlice& slice : shares[rank].own) {
        if (copies[slice.key()] == 1) add_to(shares[rank].sent, slice);
      }
      if (!shares[rank].sent.empty())
        shares[rank].to = static_cast<int>(firsts[next] + (rank - firsts[i]) % size);
    }
  }
  return shares;
}

uint64_t copy_bytes(std::span<const CopiedSlice> slices) {
  if (slices.empty()) return 0;
  return round_up(slices.back().offset + slices.back().bytes(), CopyRegion::kAlignment);
}

CopyIndex::CopyIndex(std::span<const FoundCopies> found, int node) {
  for (const bool here : {true, false}) {
    for (const FoundCopies& each : found) {
      if ((each.place.node == node) != here) continue;
      for (const CopiedSlice& slice : each.slices) by_name_[slice.name].push_back({&each, &slice});
    }
  }
}

std::optional<std::vector<CopySource>> CopyIndex::sources_of(const CopiedSlice& wanted,
                                                             const CopyId& copy) const {
  const auto named = by_name_.find(wanted.name);
  if (named == by_name_.end()) return std::nullopt;
  std::vector<Entry> entries;
  std::ranges::copy_if(named->second, std::back_inserter(entries), [&](const Entry& entry) {
    const CopiedSlice& slice = *entry.slice;
    return std::ranges::find(entry.from->copies, copy) != entry.from->copies.end() &&
           slice.shape == wanted.shape && slice.dtype == wanted.dtype &&
           (slice.rank < 0) == (wanted.rank < 0);
  });
  // Values that may differ between ranks are those of this rank or, where it has none, of the
  // first.
  std::optional<int> origin;
  for (const Entry& entry : entries) {
    const int rank = entry.slice->rank;
    if (rank == wanted.rank || origin == wanted.rank) {
      origin = wanted.rank;
    } else {
      origin = std::min(origin.value_or(rank), rank);
    }
  }
  std::vector<CopySource> sources;
  std::vector<Box> rest{wanted.box};
  for (const auto& [from, slice] : entries) {
    if (slice->rank != origin) continue;
    for (const Box& box : rest) {
      const Box part = box.intersect(slice->box);
      if (!part.empty()) sources.push_back({from, slice, part});
    }
    rest = layout::subtract(rest, slice->box);
    if (rest.empty()) return sources;
  }
  return std::nullopt;
}

}  // namespace lockstep::train
