// SPDX-License-Identifier: Apache-2.0
#include "lockstep/train/step_sums.h"

#include <ATen/ATen.h>

#include <string>
#include <vector>

#include "lockstep/comm/collectives.h"

namespace lockstep::train {

StepSums combine(const at::Tensor& losses, bool stop, const mesh::Mesh& mesh) {
  const int64_t count = losses.numel();
  const at::Tensor mine = at::cat({losses, at::full({1}, stop ? 1 : 0, at::kDouble)});
  const at::Tensor all = at::empty({mesh.size(), count + 1}, at::kDouble);
  comm::all_gather(all, mine, mesh.group(), {.tag = "losses"}).wait();
  StepSums sums;
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
    sums.stop = sums.stop || values[rank][count] != 0;
  }
  sums.loss /= mesh.size("dp");
  return sums;
}

}  // namespace lockstep::train
