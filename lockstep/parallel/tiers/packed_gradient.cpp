// SPDX-License-Identifier: Apache-2.0
#include "lockstep/parallel/tiers/packed_gradient.h"

#include <ATen/ATen.h>

#include <array>
#include <utility>

#include "lockstep/codec/checksum.h"
#include "lockstep/core/error.h"

namespace lockstep::parallel::detail {

using Access = memory::AddressRange::Access;

PackedGradient::PackedGradient(int64_t count, at::ScalarType dtype, OffloadTiers& tiers,
                               std::string what)
    : range_(std::make_shared<memory::AddressRange>(
          static_cast<size_t>(count) * c10::elementSize(dtype), Access::none)),
      values_(at::from_blob(
          range_->data(), std::array<int64_t, 1>{count}, [range = range_](void*) {},
          at::TensorOptions().dtype(dtype))),
      packed_(at::empty({PackedValues::memory_size(count, dtype)}, at::kByte), count, dtype, tiers,
              std::move(what)) {}

// No change of a single word goes unseen, so that writes past torch's operators count too.
uint64_t PackedGradient::checksum() const {
  return codec::checksum({range_->data(), values_.nbytes()});
}

void PackedGradient::begin() {
  if (!open_) range_->set_access(Access::read_write);
  open_ = is_new_ = true;
}

void PackedGradient::open() {
  if (open_) return;
  check(packed_.bytes() > 0, "gradients are read after there were some");
  range_->set_access(Access::read_write);
  open_ = true;
  packed_.view().read_all(values_.scalar_type(), range_->data());
  opened_ = checksum();
}

void PackedGradient::settle() {
  if (!open_) return;
  if (is_new_ || checksum() != opened_) packed_.write(range_->data());
  range_->set_access(Access::none);
  open_ = is_new_ = false;
}

}  // namespace lockstep::parallel::detail
