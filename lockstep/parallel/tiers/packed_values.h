// SPDX-License-Identifier: Apache-2.0
// Values that LZ4 has compressed, in memory of a fixed place that peers may read: a table of where
// each pack of layout::kPackedElements ends, then the packs. The memory is as large as they can
// get. Pages that they do not need have nothing behind them. Private: not installed.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "lockstep/memory/budget.h"
#include "lockstep/parallel/tiers/offload_tiers.h"

namespace lockstep::parallel::detail {

// Of this rank or of a peer, which must not write meanwhile.
struct PackedView {
  const std::byte* memory;
  int64_t count;  // elements
  at::ScalarType dtype;

  int64_t num_packs() const;
  // Writes a pack's elements as `dtype` to `to`, where its first one goes. Error where the bytes
  // are damaged. Thread safe.
  void read(int64_t pack, at::ScalarType as, std::byte* to) const;
  void read_all(at::ScalarType as, std::byte* to) const;
};

class PackedValues {
 public:
  // Bytes of memory for so many elements, in whole pages.
  static int64_t memory_size(int64_t count, at::ScalarType dtype);

  // `memory`: 1-d, of so many bytes. The host budget of `tiers`, which must outlive this, counts
  // the pages in use, for `what`.
  PackedValues(at::Tensor memory, int64_t count, at::ScalarType dtype, OffloadTiers& tiers,
               std::string what);

  void write(const std::byte* values);
  PackedView view() const;
  // In use now; 0 before the first write(). By any thread.
  size_t bytes() const { return bytes_; }

 private:
  at::Tensor memory_;
  int64_t count_;
  at::ScalarType dtype_;
  OffloadTiers& tiers_;
  memory::Budget::Share share_;
  std::string what_;
  std::atomic<size_t> bytes_ = 0;
};

}  // namespace lockstep::parallel::detail
