// SPDX-License-Identifier: Apache-2.0
#include "lockstep/comm/control/rank_texts.h"

#include <ATen/ATen.h>

#include <chrono>
#include <cstring>

#include "lockstep/comm/control/missing_peer.h"
#include "lockstep/comm/control/rank_error.h"
#include "lockstep/core/format.h"

namespace lockstep::comm {
namespace {

// Others may still be writing gigabytes; a rank that has died is noticed at once all the same.
constexpr std::chrono::minutes kSlowestRank{30};

}  // namespace

std::vector<std::string> gather_texts(const std::string& text, const Group& group,
                                      const CollectiveOptions& options) {
  if (group.size() == 1) return {text};
  const auto tag = [&](const char* of) {
    return options.tag.empty() ? std::string() : options.tag + of;
  };
  const at::Tensor sizes = at::empty({group.size()}, at::kLong);
  all_gather(sizes, at::full({1}, static_cast<int64_t>(text.size()), at::kLong), group,
             {.timeout = options.timeout, .tag = tag(" sizes")})
      .wait();
  std::vector<int64_t> counts(sizes.data_ptr<int64_t>(), sizes.data_ptr<int64_t>() + group.size());
  const at::Tensor bytes = at::empty({sizes.sum().item<int64_t>()}, at::kByte);
  const at::Tensor mine = at::empty({static_cast<int64_t>(text.size())}, at::kByte);
  std::memcpy(mine.data_ptr(), text.data(), text.size());
  all_gather(bytes, mine, group,
             {.counts = counts, .timeout = options.timeout, .tag = tag(" texts")})
      .wait();
  std::vector<std::string> texts;
  const char* next = static_cast<const char*>(bytes.data_ptr());
  for (const int64_t count : counts) {
    texts.emplace_back(next, static_cast<size_t>(count));
    next += count;
  }
  return texts;
}

std::vector<std::string> run_on_all_ranks(const std::string& what, const Group& group,
                                          const std::function<std::string()>& function) {
  using detail::Contribution, detail::RankError;
  const Contribution mine(group.rank(), function);
  std::vector<std::string> texts = with_peer_hint(
      format("all ranks of the group must take part in {}", what),
      [&] { return gather_texts(mine.text(), group, {.timeout = kSlowestRank, .tag = what}); });
  mine.throw_if_failed();
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    if (auto error = Contribution::error_in(texts[rank])) {
      // The group itself still works here, whatever the other rank thinks of one of its groups.
      if (error->is_comm()) error->kind = RankError::Kind::other;
      error->message = format("[{}] rank {} failed: {}", what, rank, error->message);
      error->raise();
    }
    texts[rank] = Contribution::value_in(texts[rank]);
  }
  return texts;
}

}  // namespace lockstep::comm
