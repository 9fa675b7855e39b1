// SPDX-License-Identifier: Apache-2.0
#include "lockstep/train/integrity/state_vote.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <map>
#include <set>
#include <string_view>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/control/rank_texts.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/log.h"
#include "lockstep/core/trace.h"
#include "lockstep/train/integrity/checksum.h"

namespace lockstep::train {
namespace {

using checkpoint::NamedSlice;

// The same text on every rank that holds the slice.
std::string what_of(const NamedSlice& slice) {
  const layout::Placement& placement = slice.placement;
  return placement.is_whole() ? placement.name : placement.name + " " + placement.slice.describe();
}

std::string ranks_text(const std::vector<int>& ranks) {
  return format("rank{} {}", ranks.size() > 1 ? "s" : "", join(ranks));
}

}  // namespace

void StateVote::find_holders(const std::vector<NamedSlice>& slices) {
  std::string mine;
  std::map<std::string, int64_t> places;
  for (size_t i = 0; i < slices.size(); ++i) {
    if (slices[i].of_first_rank || slices[i].placement.is_empty()) continue;
    const std::string what = what_of(slices[i]);
    if (places.emplace(what, static_cast<int64_t>(i)).second) mine += what + '\n';
  }
  std::map<std::string, std::vector<int>> holders;
  const std::vector<std::string> lists = comm::gather_texts(mine, world_);
  for (size_t rank = 0; rank < lists.size(); ++rank) {
    for (std::string_view rest = lists[rank]; !rest.empty();) {
      const size_t end = rest.find('\n');
      holders[std::string(rest.substr(0, end))].push_back(static_cast<int>(rank));
      rest.remove_prefix(end + 1);
    }
  }
  for (auto& [what, ranks] : holders) {
    if (ranks.size() < 2) continue;
    const auto place = places.find(what);
    items_.push_back({what, std::move(ranks), place == places.end() ? -1 : place->second});
  }
  found_holders_ = true;
}

std::vector<StateVote::Split> StateVote::compare(const std::vector<NamedSlice>& slices) const {
  std::vector<at::Tensor> tensors;
  std::vector<int64_t> counts(static_cast<size_t>(world_.size()));
  for (const Item& item : items_) {
    for (const int rank : item.holders) ++counts[static_cast<size_t>(rank)];
    if (item.mine < 0) continue;
    const NamedSlice& slice = slices[static_cast<size_t>(item.mine)];
    if (slice.saving) slice.saving();
    tensors.push_back(slice.tensor);
  }
  const at::Tensor mine = checksums(tensors);
  int64_t total = 0;
  std::vector<int64_t> next;  // of each rank, the place of its next checksum
  for (const int64_t count : counts) {
    next.push_back(total);
    total += count;
  }
  const at::Tensor all = at::empty({total}, at::kLong);
  comm::all_gather(all, mine, world_, {.counts = counts, .tag = "checksums of state"}).wait();
  const int64_t* const checksums = all.data_ptr<int64_t>();
  std::vector<Split> splits;
  for (const Item& item : items_) {
    std::map<int64_t, std::vector<int>> camps;
    for (const int rank : item.holders)
      camps[checksums[next[static_cast<size_t>(rank)]++]].push_back(rank);
    if (camps.size() == 1) continue;
    Split split{.item = &item, .majority = {}, .others = {}, .camps = {}};
    size_t most = 0;
    for (const auto& [sum, ranks] : camps) {
      split.camps.push_back(ranks_text(ranks));
      if (ranks.size() == most) split.majority.clear();  // no camp is the largest
      if (ranks.size() > most) split.majority = ranks;
      most = std::max(most, ranks.size());
    }
    if (most == 1) split.majority.clear();
    for (const int rank : item.holders) {
      if (std::ranges::find(split.majority, rank) == split.majority.end())
        split.others.push_back(rank);
    }
    splits.push_back(std::move(split));
  }
  return splits;
}

// The first of the majority sends to each of the others.
void StateVote::repair(const std::vector<Split>& splits,
                       const std::vector<NamedSlice>& slices) const {
  const at::NoGradGuard no_grad;
  std::set<const void*> opened;  // shards may be written when their models say so
  for (const NamedSlice& slice : slices) {
    if (slice.model && opened.insert(slice.model->shared().get()).second)
      parallel::ShardedModel(*slice.model).begin_update();
    // What is made from weights, such as their 8-bit codes, is made by all ranks together: all see
    // a change.
    slice.tensor.unsafeGetTensorImpl()->bump_version();
  }
  std::vector<const NamedSlice*> received;
  for (const Split& split : splits) {
    if (split.item->mine < 0) continue;
    const NamedSlice& slice = slices[static_cast<size_t>(split.item->mine)];
    const int source = split.majority.front();
    for (const int rank : split.others) {
      if (world_.rank() == source) {
        checkpoint::open_to_read(slice.tensor);
        comm::send(slice.tensor.contiguous(), rank, world_, {.tag = "bits of the majority"}).wait();
      }
      if (world_.rank() != rank) continue;
      const at::Tensor good = at::empty(slice.tensor.sizes(), slice.tensor.options());
      comm::recv(good, source, world_, {.tag = "bits of the majority"}).wait();
      slice.tensor.copy_(good);
      received.push_back(&slice);
    }
  }
  // The first call for a tensor takes over all of its offloaded state.
  for (const NamedSlice* slice : received) {
    if (slice->loaded) slice->loaded();
  }
}

bool StateVote::verify(int64_t step, const std::vector<NamedSlice>& slices) {
  const trace::Span span("train", "verify state");
  if (!found_holders_) find_holders(slices);
  const std::vector<Split> splits = compare(slices);
  if (splits.empty()) return false;
  // The worst: one that has no majority.
  const Split& shown = *std::ranges::min_element(
      splits, {}, [](const Split& split) { return !split.majority.empty(); });
  const std::string more =
      splits.size() > 1 ? format(", and {} more tensors differ", splits.size() - 1) : "";
  const std::string what =
      shown.majority.empty()
          ? format(
                "step {}: {} hold different bits of {}{}: there is no majority, and {} cannot "
                "tell which is corrupt",
                step, join(shown.camps, " and "), shown.item->what, more,
                counted(static_cast<int64_t>(shown.item->holders.size()), "holder"))
          : format(
                "step {}: {} holds other bits of {} than {} ({} of {} agree){}: memory of {} is "
                "corrupt",
                step, ranks_text(shown.others), shown.item->what, ranks_text(shown.majority),
                shown.majority.size(), shown.item->holders.size(), more, ranks_text(shown.others));
  if (shown.majority.empty() || on_corruption_ == config::OnCorruption::stop) {
    throw Error(
        format("{}; resume from the newest checkpoint, which has state that was verified", what));
  }
  repair(splits, slices);
  if (world_.rank() == 0) log::warn(format("{}; repaired with the bits of the majority", what));
  return true;
}

}  // namespace lockstep::train
