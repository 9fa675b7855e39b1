// SPDX-License-Identifier: Apache-2.0
// Rules of offload_plan.h that need no plan.
#include "lockstep/core/system_memory.h"
#include "lockstep/layout/offload_plan.h"

namespace lockstep::layout {
namespace {

constexpr int64_t kCudaBlock = 512;  // bytes: torch's allocator gives multiples of it

}  // namespace

KindBytes& KindBytes::operator+=(const KindBytes& other) {
  params += other.params;
  grads += other.grads;
  states += other.states;
  return *this;
}

std::optional<UpdateSite> decided_site(const OffloadOptions& options) {
  if (options.advanced.update_site != UpdateSite::automatic) return options.advanced.update_site;
  if (!options.optimizer) return UpdateSite::device;        // where its state is
  if (options.codec.is_lossless()) return UpdateSite::cpu;  // which is where LZ4 is
  return std::nullopt;
}

OffloadMachine offload_machine(const OffloadOptions& options, bool cuda) {
  const auto page = static_cast<int64_t>(page_size());
  return {.cuda = cuda,
          .device_grain = cuda ? kCudaBlock : page,
          .host_grain = page,
          .site = decided_site(options).value_or(cuda ? UpdateSite::device : UpdateSite::cpu)};
}

int64_t num_gradient_blocks(bool in_backward, bool cuda) { return in_backward && cuda ? 4 : 2; }

size_t units_ahead(std::span<const size_t> parameters, int prefetch) {
  size_t units = 0, sum = 0;
  while (units < parameters.size() &&
         (units == 0 || sum + parameters[units] <= static_cast<size_t>(prefetch))) {
    sum += parameters[units++];
  }
  return units;
}

}  // namespace lockstep::layout
