// SPDX-License-Identifier: Apache-2.0
// Slices from copies that other ranks have made, in any layout. Private: not installed.
#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <vector>

#include "lockstep/checkpoint/slices.h"
#include "lockstep/comm/group.h"
#include "lockstep/train/recovery/copied_slices.h"

namespace lockstep::train {

// What a slice of this rank is filled from. Nothing: it is empty.
using SourcesOfSlices = std::vector<std::vector<CopySource>>;

// Collective. Fills each slice from its sources. `data` gives what a place on this rank's node
// holds of the state that is restored; `node` is the first rank on it. Bytes of other nodes come
// from the ranks that keep them.
void fill_slices(const std::vector<checkpoint::NamedSlice>& slices, const SourcesOfSlices& sources,
                 const std::function<std::span<const std::byte>(const CopyPlace&)>& data, int node,
                 const comm::Group& world);

}  // namespace lockstep::train
