// SPDX-License-Identifier: Apache-2.0
#include "lockstep/checkpoint/exchange.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <numeric>

#include "lockstep/comm/collectives.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::checkpoint::detail {
namespace {

// Others may still be writing gigabytes; a rank that has died is noticed at once all the same.
constexpr std::chrono::minutes kPatience{30};

// What a rank's text begins with.
constexpr char kGood = '+', kFailed = '-', kBadCheckpoint = 'C', kBadInput = 'I';

}  // namespace

std::vector<std::string> exchange_texts(const std::string& mine, const comm::Group& group) {
  if (group.size() == 1) return {mine};
  const at::Tensor size = at::full({1}, static_cast<int64_t>(mine.size()), at::kLong);
  const at::Tensor sizes = at::empty({group.size()}, at::kLong);
  comm::all_gather(sizes, size, group, {.timeout = kPatience, .tag = "checkpoint sizes"}).wait();
  const int64_t* first = sizes.data_ptr<int64_t>();
  const std::vector<int64_t> counts(first, first + group.size());
  const at::Tensor text = at::empty({static_cast<int64_t>(mine.size())}, at::kByte);
  std::copy(mine.begin(), mine.end(), text.data_ptr<uint8_t>());
  const at::Tensor all =
      at::empty({std::accumulate(counts.begin(), counts.end(), int64_t{0})}, at::kByte);
  comm::all_gather(all, text, group,
                   {.counts = counts, .timeout = kPatience, .tag = "checkpoint texts"})
      .wait();
  std::vector<std::string> texts;
  const auto* place = reinterpret_cast<const char*>(all.data_ptr<uint8_t>());
  for (const int64_t count : counts) {
    texts.emplace_back(place, static_cast<size_t>(count));
    place += count;
  }
  return texts;
}

std::vector<std::string> run_on_all_ranks(const char* what, const comm::Group& group,
                                          const std::function<std::string()>& function) {
  std::exception_ptr failure;
  std::string text;
  try {
    text = kGood + function();
  } catch (const CheckpointError& error) {
    failure = std::current_exception();
    text = std::string(1, kBadCheckpoint) + error.what();
  } catch (const ConfigError& error) {
    failure = std::current_exception();
    text = std::string(1, kBadInput) + error.what();
  } catch (const std::exception& error) {
    failure = std::current_exception();
    text = std::string(1, kFailed) + error.what();
  }
  std::vector<std::string> texts = exchange_texts(text, group);
  if (failure) std::rethrow_exception(failure);
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    const char kind = texts[rank].front();
    texts[rank].erase(0, 1);
    if (kind == kGood) continue;
    const std::string problem = format("[{}] rank {} failed: {}", what, rank, texts[rank]);
    // The same class on all ranks: what they do about it, they do together.
    if (kind == kBadCheckpoint) throw CheckpointError(problem);
    if (kind == kBadInput) throw ConfigError(problem);
    throw Error(problem);
  }
  return texts;
}

}  // namespace lockstep::checkpoint::detail
