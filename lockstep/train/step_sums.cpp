// SPDX-License-Identifier: Apache-2.0
#include "lockstep/train/step_sums.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <string>
#include <vector>

#include "lockstep/comm/collectives.h"

namespace lockstep::train {

StepSums combine(const at::Tensor& losses, const RankFigures& figures, const mesh::Mesh& mesh) {
  const int64_t count = losses.numel();
  const at::Tensor mine = at::empty({count + 3}, at::kDouble);
  mine.narrow(0, 0, count).copy_(losses);
  double* const own = mine.data_ptr<double>();
  own[count] = static_cast<double>(figures.stop);
  own[count + 1] = figures.busy_ms;
  own[count + 2] = static_cast<double>(figures.peak_bytes);
  const at::Tensor all = at::empty({mesh.size(), count + 3}, at::kDouble);
  const comm::Group group = mesh.group();
  comm::all_gather(all, mine, group, {.tag = "losses"}).wait();
  StepSums sums{.busy_ms = std::vector<double>(static_cast<size_t>(mesh.size())),
                .peak_bytes = std::vector<int64_t>(static_cast<size_t>(mesh.size()))};
  const auto values = all.accessor<double, 2>();
  // Ranks that differ on other axes have the same losses: those at the beginning of these count.
  const std::vector<std::string> names = mesh.axis_names();
  const auto counts = [&](int rank) {
    const std::vector<int> at = mesh.coordinate_of(rank).value();
    for (size_t i = 0; i < names.size(); ++i) {
      if (names[i] != "dp" && at[i] != 0) return false;
    }
    return true;
  };
  for (int rank = 0; rank < mesh.size(); ++rank) {
    for (int64_t i = 0; i < count && counts(rank); ++i) sums.loss += values[rank][i];
    sums.stop = std::max(sums.stop, static_cast<Stop>(static_cast<int>(values[rank][count])));
    const auto world_rank = static_cast<size_t>(group.members()[static_cast<size_t>(rank)]);
    sums.busy_ms[world_rank] = values[rank][count + 1];
    sums.peak_bytes[world_rank] = static_cast<int64_t>(values[rank][count + 2]);
  }
  sums.loss /= mesh.size("dp");
  return sums;
}

}  // namespace lockstep::train
