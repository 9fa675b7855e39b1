// SPDX-License-Identifier: Apache-2.0
#include "lockstep/parallel/flat/offloaded_residence.h"

#include <ATen/ATen.h>

namespace lockstep::parallel::detail {

using layout::Tier;

at::Tensor OffloadedResidence::line_memory(at::ScalarType dtype, c10::Device device) {
  if (device != plan_.device) return GatheredResidence::line_memory(dtype, device);
  return tiers().parameters_on_device(parameter_.layout().size, dtype, plan_.name,
                                      memory::Stay::short_time);
}

bool OffloadedResidence::has_room() const {
  // Where a gather takes part of all ranks, none may decide by itself.
  if (is_collective()) return true;
  const size_t bytes =
      static_cast<size_t>(parameter_.layout().size) * c10::elementSize(plan_.compute_dtype);
  return tiers().param_budget.fits(tiers().device_memory.rounded(bytes)) &&
         tiers().device_memory.fits(bytes);
}

void OffloadedResidence::begin(bool beside_computation) {
  GatheredResidence::begin(beside_computation);
  if (plan_.shard.size() > 1 && plan_.offload->params == Tier::host)
    tiers().traffic.to_device += static_cast<int64_t>(line_.nbytes());
}

void HostResidence::begin(bool /*beside_computation*/) {
  line_ = line_memory(plan_.compute_dtype, plan_.device);
  memory::Queue& fetch = *tiers().fetch;
  // The line's memory was another's, and may still be read by what is queued.
  fetch.wait(memory::computed(plan_.device));
  fetch.wait(shard_.updating());
  tiers().to_device(fetch, line_.data_ptr(), shard_.values().data_ptr(), line_.nbytes(),
                    plan_.name);
  fetched_ = fetch.record();
  if (!tiers().options.advanced.overlap) fetched_.wait();
}

void HostResidence::wait() { memory::compute_after(std::exchange(fetched_, {}), plan_.device); }

}  // namespace lockstep::parallel::detail
