// SPDX-License-Identifier: Apache-2.0
// Optimizer state in slices, and the ring of device memory through which those that rest elsewhere
// stream: sizes alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "lockstep/codec/packed_state.h"
#include "lockstep/layout/offload.h"
#include "lockstep/layout/offload_places.h"

namespace lockstep::layout {

// Part of a tensor that the optimizer updates, whose state moves by itself.
struct StateSlice {
  int64_t begin = 0, count = 0;  // elements
  Tier tier = Tier::device;
};

// The state of one such tensor.
struct StatePlan {
  codec::PackedFormat format = {};
  bool lossless = false;  // compressed by LZ4 where it rests outside the device
  std::vector<StateSlice> slices = {};
};

// Elements of a slice: large enough for the link, small enough for the device's limit.
int64_t slice_elements(const OffloadOptions& options, bool cuda);

// A gradient of float16 may be float32 when it is used: divided by a loss scale it does not fit.
constexpr DType updated_with(DType grad) { return grad == DType::float16 ? DType::float32 : grad; }

// What a slice has in the ring, in bytes: its state, then its parameter and its gradient where
// these may rest on the host.
struct SlotLayout {
  size_t param = 0, grad = 0, total = 0;
};
SlotLayout slot_layout(const codec::PackedFormat& format, int64_t elements,
                       const OffloadOptions& options);

// Slices in the ring at the same time, at least: one that comes, one that is computed with, one
// that goes.
inline constexpr int64_t kFewSlices = 3;

// Bytes that slices take in the ring.
struct RingNeed {
  int64_t largest = 0, all = 0;
  RingNeed& operator+=(const RingNeed& other);
  // For a few of the largest slices.
  int64_t least() const;
};
RingNeed ring_need(const StatePlan& plan, const OffloadOptions& options);
// As many bytes as are useful in `room` bytes of the device, and need.least() at least. `streams`:
// updates are made on a device behind a link, which the ring hides.
int64_t ring_bytes(const RingNeed& need, const OffloadOptions& options, bool streams, int64_t room);

}  // namespace lockstep::layout
