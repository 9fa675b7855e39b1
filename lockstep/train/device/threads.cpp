// SPDX-License-Identifier: Apache-2.0
#include "lockstep/train/device/threads.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "lockstep/comm/collectives.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/log.h"

namespace lockstep::train {

std::string set_threads(const config::TrainConfig& config, const comm::Group& group) {
  const comm::CoreShare share = comm::share_of_cores(group);
  const int threads = config.threads(share.threads);
  const bool bound = threads <= static_cast<int>(share.own.size());
  if (bound) comm::bind_to_cores(share);
  at::set_num_threads(threads);
  const at::Tensor mine = at::tensor({static_cast<double>(threads), share.cores}, at::kDouble);
  const at::Tensor all = at::empty({group.size(), 2}, at::kDouble);
  comm::all_gather(all, mine.unsqueeze(0), group, {.tag = "threads"}).wait();
  const at::Tensor of_ranks = all.select(1, 0), cores = all.select(1, 1);
  const int least = of_ranks.min().item<int>(), most = of_ranks.max().item<int>();
  if (config.train.reproducible && least != most) {
    throw ConfigError(
        format("train.reproducible needs the same number of threads on every rank; "
               "they have from {} to {}: set train.threads",
               least, most));
  }
  const at::Tensor crowded = of_ranks.gt(cores + 1e-6).nonzero();
  if (group.rank() == 0 && crowded.numel() > 0) {
    const auto rank = crowded[0].item<int64_t>();
    log::warn(format(
        "{} of {} ranks have more compute threads than cores, which makes steps slow (rank "
        "{}: {} for {:.3g} cores); start fewer ranks{}",
        crowded.numel(), group.size(), rank, of_ranks[rank].item<int>(), cores[rank].item<double>(),
        most > 1 ? ", or set train.threads or OMP_NUM_THREADS lower" : ""));
  }
  const std::string where = bound ? ", bound to cores" : "";
  if (least != most) return format("{} to {} threads each{}", least, most, where);
  return format("{} thread{} each{}", threads, threads > 1 ? "s" : "", where);
}

}  // namespace lockstep::train
