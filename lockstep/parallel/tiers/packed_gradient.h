// SPDX-License-Identifier: Apache-2.0
// Gradients in host memory, which LZ4 compresses between their uses. The values have
// addresses of their own, with memory behind them from open() or begin() to settle(). Private: not
// installed.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "lockstep/memory/arena.h"
#include "lockstep/parallel/tiers/packed_values.h"

namespace lockstep::parallel::detail {

// One thread at a time: the caller orders them.
class PackedGradient {
 public:
  // The host budget of `tiers`, which must outlive this, counts what they take compressed.
  PackedGradient(int64_t count, at::ScalarType dtype, OffloadTiers& tiers, std::string what);
  PackedGradient(const PackedGradient&) = delete;
  PackedGradient& operator=(const PackedGradient&) = delete;

  // 1-d. It may outlive this.
  const at::Tensor& values() const { return values_; }
  // Memory for new values, without what was there.
  void begin();
  // Memory with what was there.
  void open();
  // Compresses what has changed since open(), also past torch's operators, or all after begin().
  // No-op where there is no memory.
  void settle();

  // Compressed; 0 before the first settle(). By any thread.
  size_t bytes() const { return packed_.bytes(); }

 private:
  uint64_t checksum() const;

  std::shared_ptr<memory::AddressRange> range_;
  at::Tensor values_;
  PackedValues packed_;
  bool open_ = false, is_new_ = false;
  uint64_t opened_ = 0;  // the checksum then
};

}  // namespace lockstep::parallel::detail
